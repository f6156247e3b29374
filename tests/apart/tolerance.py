"""The error tolerance of CONTRIBUTING.md: a result may be as far from float64 as eager code is, times a constant.

Eager's error on one drawn input can be 0 by luck (a single token, sums that come out to the last bit), and then says
nothing of what eager PyTorch is worth there. A result that is over its tolerance is therefore judged once more: eager's
error is then the largest on the input and on ``NEIGHBOURS`` others that differ from it in the last bit of each number.
"""

import math

import torch

from tests.apart.call import DTYPES

FORWARD, GRADIENT = 2.0, 3.0
NEIGHBOURS = 32
# A float64 call's rounding is taken as float32's, 29 bits further down: nothing more exact exists to compare with. That
# is no measure where float32's error is as large as the result: then it is how far the float64 equations move.
_DOWN = 2.0**-29
_MASKS = 1e6  # biases of this size take a token away


class Wrong(Exception):
    """A call gave what it must not; ``ratio`` is the error as a share of its tolerance."""

    def __init__(self, text, ratio=0.0):
        super().__init__(text)
        self.ratio = ratio


class ToleranceChecker:
    """Compares results with float64.

    Args:
        evaluate: ``evaluate(tensors, cast, nudge, context)`` gives the results of the equations by name, after casting
            every floating tensor to ``cast`` unless that is None; under the call's autocast if ``context``.
        tensors: the tensors of the call.
        dtype: name of the dtype that the call computes in.
        lenient: whether results need not be finite where eager code's in the same dtype are not.
        jumps: whether results are discontinuous where something is compared with a threshold.
    """

    def __init__(self, evaluate, tensors, dtype, lenient=False, jumps=False):
        self._evaluate, self._tensors, self._lenient, self._jumps = evaluate, tensors, lenient, jumps
        self._double = dtype == "float64"
        self._eps = torch.finfo(DTYPES[dtype]).eps
        self._exact, self._eager, self._single = {}, {}, {}
        self.worst, self.why, self.close = 0.0, "", False

    def exact(self, turn=0):
        """Return the results in float64, for the call's tensors or for a neighbour's."""
        if turn not in self._exact:
            self._exact[turn] = self._evaluate(self._neighbour(turn), torch.float64, 0.0, False)
        return self._exact[turn]

    def _neighbour(self, turn, double=False):
        """Return the tensors with each number moved by up to one rounding; the zeros and infinities stay.

        A float64 call's numbers move by a rounding of float32, whose error stands for it, or if ``double`` of float64.
        """
        if turn == 0:
            return self._tensors
        g = torch.Generator().manual_seed(turn)

        def moved(value):
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                return value
            eps = torch.finfo(torch.float32 if self._double and not double else value.dtype).eps
            # Numbers that are one in memory stay equal: sums of equal numbers round alike, those of others in part.
            sizes = [1 if stride == 0 else size for size, stride in zip(value.shape, value.stride(), strict=True)]
            shift = torch.randint(-1, 2, sizes, generator=g).double() * eps
            near = (value.double() * (1 + shift)).to(value.dtype)
            if turn % 2 and near.ndim == 4:  # as models lay heads out: PyTorch's products are other routines then
                return near.transpose(1, 2).contiguous().transpose(1, 2)
            return near.contiguous()

        return {name: moved(value) for name, value in self._tensors.items()}

    def _eager_error(self, name, where, turn):
        """Return eager's error; where its dtype does not hold what is between, float32's, and None if neither does."""
        truth = self.exact(turn)[name]
        where = where & truth.isfinite()
        if turn not in self._eager:
            cast = torch.float32 if self._double else None
            self._eager[turn] = self._evaluate(self._neighbour(turn), cast, 0.0, True)
        usual = error(self._eager[turn][name], truth, where)
        if not math.isfinite(usual) and not self._lenient:
            if turn not in self._single:
                self._single[turn] = self._evaluate(self._neighbour(turn), torch.float32, 0.0, False)
            usual = error(self._single[turn][name], truth, where)
        return usual * (_DOWN if self._double else 1.0) if math.isfinite(usual) else None

    def _moved(self, name, where, turn):
        """Return how far a float64 call's truth moves with its numbers' last bits."""
        if not self._double:
            return 0.0
        moved = self._evaluate(self._neighbour(turn, double=True), torch.float64, 0.0, False)[name]
        return error(moved, self.exact()[name], where & moved.isfinite())

    def check_against(self, name, value, factor, label=""):
        """Raise ``Wrong`` if ``value`` is not what ``name`` must be."""
        truth = self.exact()[name]
        check(value.shape == truth.shape, f"{label}{name} has shape {tuple(value.shape)}, not {tuple(truth.shape)}")
        infinite = truth == -math.inf  # the logsumexp of a row without keys
        check(torch.equal(value.double()[infinite], truth[infinite]), f"{label}{name} is not infinite where it must be")
        where = truth.isfinite() & (truth.abs() < 0.99 * torch.finfo(value.dtype).max)
        wrong, usual = error(value, truth, where), self._eager_error(name, where, 0)
        if usual is None:
            return  # float32 overflows in between: nothing is promised
        check(math.isfinite(wrong), f"{label}{name} is not finite where float64 is")
        largest = truth[where].abs().max().item() if where.any() else 0.0
        smallest = self._negligible(value.dtype) + (self._unresolved() if name.startswith("d") else 0.0)
        factor += self._double  # the float64 equations round as much as the call
        tolerance = factor * (usual + self._eps * largest + smallest)
        if wrong > tolerance:
            self.close = True
            jump = self._jump(name, truth, where)
            for turn in range(1, NEIGHBOURS + 1):
                usual = max(usual, self._eager_error(name, where, turn) or 0.0, self._moved(name, where, turn))
                tolerance = factor * (usual + self._eps * largest + smallest) + jump
                if wrong <= tolerance:
                    break
        share = wrong / tolerance if tolerance else math.inf if wrong else 0.0
        if share > self.worst:
            self.worst = share
            self.why = f"{label}{name}: error {wrong:.3g}, eager's {usual:.3g}, largest {largest:.3g}"

    def _unresolved(self):
        """Return what float64 does not resolve of a gradient: a softmax's is a difference, which may cancel.

        Where one weight is all of its row, that rounding is all there is of it in float64; a kernel can be nearer.
        Biases of _MASKS and beyond leave nothing to cancel.
        """
        tallest, largest_upstream, width = 1.0, 0.0, 1
        for name, value in self._tensors.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
                height = value.double().abs()
                height = height.where(height < _MASKS, 0.0).max().item()  # NaN is not less, either
                upstream = name in ("dout", "dlse", "dmembership")
                largest_upstream = max(largest_upstream, height) if upstream else largest_upstream
                tallest *= 1.0 if upstream else max(height, 1.0)
                width = max(width, value.shape[-1]) if value.ndim else width
        return torch.finfo(torch.float64).eps * largest_upstream * tallest * width

    def _negligible(self, dtype):
        """Return what is as good as 0: what processors may flush, and in float16 the smallest number."""
        limits = torch.finfo(dtype)
        return limits.smallest_normal * (limits.eps if dtype == torch.float16 else 1.0)

    def raise_if_over(self):
        """Raise ``Wrong`` if something was over its tolerance."""
        if self.worst > 1:
            raise Wrong(f"{self.worst:.3g} tolerances: {self.why}", self.worst)

    def _jump(self, name, truth, where):
        """Return how far float64 itself jumps where thresholds move by a few roundings."""
        if not self._jumps:
            return 0.0
        step = 2 * max(self._eps, 4e-7)
        moved = (self._evaluate(self._tensors, torch.float64, sign * step, False)[name] for sign in (-1, 1))
        return max(error(value, truth, where) for value in moved)


def error(value, truth, where):
    """Return the largest error, infinite where a number is missing."""
    difference = (value.double() - truth)[where].abs()
    if not difference.numel():
        return 0.0
    return math.inf if difference.isnan().any() else difference.max().item()


def same(a, b):
    """Whether two tensors have the same values, NaN like NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


def check(condition, text):
    """Raise Wrong with ``text`` unless ``condition``."""
    if not condition:
        raise Wrong(text)
