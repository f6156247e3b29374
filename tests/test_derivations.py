"""The formulas of docs/derivations.md, evaluated in float64 and compared with autograd of the equations."""

import math

import pytest
import torch

SCALE, ETA, LAMBD = 0.3, 0.2, 0.05


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class Attention:
    """One head: tokens, upstream gradients, and what autograd says of the plain equations."""

    def __init__(self, causal=False, dropout_p=0.0):
        self.w = drawn(9, 4).requires_grad_()
        self.g, self.dlse = drawn(9, 4), drawn(9)
        self.factor = (torch.rand(9, 9) >= dropout_p).double() / (1 - dropout_p)
        self.allowed = torch.ones(9, 9, dtype=torch.bool).tril() if causal else torch.ones(9, 9, dtype=torch.bool)
        scores = (SCALE * self.w @ self.w.T).masked_fill(~self.allowed, -math.inf)
        out, lse = (scores.softmax(1) * self.factor) @ self.w, scores.logsumexp(1)
        (self.dw,) = torch.autograd.grad([out, lse], self.w, [self.g, self.dlse])
        self.w, self.out, self.lse = self.w.detach(), out.detach(), lse.detach()
        self.scores = SCALE * self.w @ self.w.T
        self.weights = torch.where(self.allowed, (self.scores - self.lse[:, None]).exp(), 0.0)
        self.shift = (self.g * self.out).sum(1) - self.dlse


CASES = pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"dropout_p": 0.3}, {"causal": True, "dropout_p": 0.3}], ids=str
)


@CASES
def test_mssa_backward(options):
    a = Attention(**options)
    ds = a.weights * (a.factor * (a.g @ a.w.T) - a.shift[:, None])
    close((a.weights * a.factor).T @ a.g + SCALE * (ds + ds.T) @ a.w, a.dw)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_mssa_one_accumulator_a_row(causal):
    a = Attention(causal=causal)
    for j in range(9):
        dw_j = torch.zeros(4, dtype=torch.float64)
        for i in range(9):
            # One score serves both directions; under the causal mask only one of them exists off the diagonal.
            p_ij = (a.scores[i, j] - a.lse[i]).exp() * a.allowed[i, j]
            p_ji = (a.scores[i, j] - a.lse[j]).exp() * a.allowed[j, i]
            a_ij = p_ij * (a.g[i] @ a.w[j] - a.shift[i])
            a_ji = p_ji * (a.g[j] @ a.w[i] - a.shift[j])
            dw_j += p_ij * a.g[i] + SCALE * (a_ij + a_ji) * a.w[i]
        close(dw_j, a.dw[j])


def test_mssa_one_exponential_serves_both_directions():
    a = Attention()
    c = a.lse.median()
    close(a.weights * (a.lse - c).exp()[:, None] * (c - a.lse).exp(), a.weights.T)


@CASES
def test_mssa_divided_gradients(options):
    a = Attention(**options)
    c = a.lse.min() - 0.3
    r = (a.lse - c).exp()
    e, h = (a.scores - c).exp(), a.g / r[:, None]
    d = (h * a.out).sum(1) - a.dlse / r
    as_key = a.allowed * (a.factor * (h @ a.w.T) - d[:, None])  # [i, j]: j as key of i
    if not options:
        together = torch.cat([h, a.w], 1) @ torch.cat([a.w, h], 1).T - d[:, None] - d
        close(as_key + as_key.T, together)
    close(SCALE * e * (as_key + as_key.T) @ a.w + (e * a.allowed * a.factor).T @ h, a.dw)


@CASES
def test_mssa_divided_gradients_in_fp16(options):
    a = Attention(**options)
    c = torch.maximum(a.lse.min(), a.lse.max() - 4 * math.log(2))
    r, f = (a.lse - c).exp(), 2.0**9
    e, h = torch.where(a.allowed, (a.scores - c).exp(), 0.0), a.g / r[:, None]
    near = 1 + 1e-12
    both = a.allowed & a.allowed.T
    assert bool((e[both] <= (torch.minimum(r[:, None], r) * near)[both]).all())
    assert bool((r <= 2**4 * near).all())
    assert bool((h.abs() * near >= 2**-4 * a.g.abs()).all())
    d = (h * a.out).sum(1) - a.dlse / r
    as_key = f * e * (a.factor * (h @ a.w.T) - d[:, None])  # [i, j]: j as key of i
    close((SCALE * (as_key + as_key.T) @ a.w + (f * e * a.factor).T @ h) / f, a.dw)


@pytest.mark.parametrize("spread", [0.0, 10.0, 21.0])
def test_mssa_rows_of_divided_weights_lose_as_much_in_fp16_as_if_they_were_normal(spread):
    """21 bits between the r of rows are the maximum beside 64 weights."""
    n, f = 64, 2.0**9
    r = 2.0 ** (4 - spread * torch.linspace(0, 1, n, dtype=torch.float64))[:, None]
    assert bool((f * r >= 2**-14 * n).all())
    weights = (4 * drawn(n, n)).softmax(1)
    lost = ((f * r * weights).half().double() / (f * r) - weights).abs()
    assert bool((lost <= torch.maximum(2**-11 * weights, torch.tensor(2**-11 / n))).all())


def test_mssa_pairs_by_halves_of_lse():
    a = Attention()
    n = a.lse / 2
    e, gamma = (a.scores - n[:, None] - n).exp(), (n - n.max()).exp()
    close(e, (a.weights * a.weights.T).sqrt())
    h = a.g * (n.max() - n).exp()[:, None]
    d = (h * a.out).sum(1) - a.dlse * (n.max() - n).exp()
    as_key = gamma * (h @ a.w.T - d[:, None])  # [i, j]: j as key of i
    close(gamma[:, None] * (e @ h) + SCALE * e * (as_key + as_key.T) @ a.w, a.dw)


def test_mssa_softmax_without_a_running_maximum():
    a = Attention()
    n = a.scores.diagonal() / 2
    e = (a.scores - n[:, None] - n).exp()
    close(e.log(), -SCALE / 2 * torch.cdist(a.w, a.w) ** 2)
    assert bool((e <= 1 + 1e-12).all())
    gamma = (n - n.max()).exp()
    sums = e @ gamma
    assert bool((sums >= gamma).all())
    close((e * gamma) @ a.w / sums[:, None], a.out)
    close(sums.log() + n + n.max(), a.lse)


class Statistics:
    """Heads, tokens and channels of one sequence; ``clamped`` has channels below the floor."""

    def __init__(self, causal, floor):
        self.w = drawn(3, 6, 4)
        self.w[1, :, 2] = 0.0
        self.w[2, :, 1] *= floor**0.5 * 1e-2
        self.temp, self.bias, self.g = drawn(3), drawn(3, 6), drawn(3, 6, 4)
        self.dmembership = drawn(3, 6)
        self.r = (torch.rand(3, 6 if causal else 1, 4) >= 0.3).double() / 0.7
        leaves = [self.w.requires_grad_(), self.temp.requires_grad_(), self.bias.requires_grad_()]
        self.total = (lambda x: x.cumsum(1)) if causal else (lambda x: x.sum(1, keepdim=True))
        square = self.w**2
        energy = self.total(square)
        self.above = (energy >= floor).double().detach()
        self.c = energy.clamp(min=floor)
        self.q = (square / self.c + (self.bias[:, :, None] if causal else 0.0)).sum(2)
        self.pi = (self.temp[:, None] * self.q).softmax(0)
        self.s = self.total(self.pi)[..., None] + 1e-8
        self.m = self.total(self.pi[..., None] * square) / self.s
        self.gate = 1 / (1 + self.m)
        out = -self.w * self.pi[..., None] * self.gate * self.r
        grads = torch.autograd.grad([out, self.pi], leaves, [self.g, self.dmembership], allow_unused=True)
        self.dw, self.dtemp, self.dbias = grads
        for name in ("w", "temp", "c", "q", "pi", "s", "m", "gate"):
            setattr(self, name, getattr(self, name).detach())

    def softmax_backward(self, dpi):
        dpi = dpi + self.dmembership
        return self.pi * (dpi - (self.pi * dpi).sum(0))


def test_tssa_backward():
    t = Statistics(causal=False, floor=1e-24)
    square, pi = t.w**2, t.pi[..., None]
    dgate = -(t.r * t.g * t.w * pi).sum(1, keepdim=True)
    dmbar = -(t.gate**2) * dgate
    dm, ds = dmbar / t.s, -(dmbar * t.m / t.s).sum(2)
    dlogit = t.softmax_backward(-(t.g * t.w * t.gate * t.r).sum(2) + (dm * square).sum(2) + ds)
    close((dlogit * t.q).sum(1), t.dtemp)
    dq = (t.temp[:, None] * dlogit)[..., None]
    dc = -t.above * (dq * square).sum(1, keepdim=True) / t.c**2
    close(-t.g * pi * t.gate * t.r + 2 * t.w * (pi * dm + dq / t.c + dc), t.dw)


def test_tssa_causal_backward():
    t = Statistics(causal=True, floor=1e-12)
    square, pi = t.w**2, t.pi[..., None]

    def from_the_last(x):
        return x.flip(1).cumsum(1).flip(1)

    dmbar = t.g * t.w * pi * t.r * t.gate**2
    u = from_the_last(dmbar / t.s)
    v = -from_the_last((dmbar * t.m / t.s).sum(2))
    dlogit = t.softmax_backward(-(t.g * t.w * t.gate * t.r).sum(2) + (u * square).sum(2) + v)
    close((dlogit * t.q).sum(1), t.dtemp)
    close(4 * t.temp[:, None] * dlogit, t.dbias)
    dq = (t.temp[:, None] * dlogit)[..., None]
    x = from_the_last(-t.above * dq * square / t.c**2)
    close(-t.g * pi * t.gate * t.r + 2 * t.w * (pi * u + dq / t.c + x), t.dw)


def test_ista_in_one_product_and_in_two():
    x, d, g = drawn(7, 5).requires_grad_(), drawn(5, 5).requires_grad_(), drawn(7, 5)
    y = (x + ETA * (x @ d - x @ d.T @ d) - ETA * LAMBD).relu()
    dx, dd = torch.autograd.grad(y, [x, d], g)
    x, d, y = x.detach(), d.detach(), y.detach()
    masked = g * (y > 0)

    residual = x - x @ d.T
    close((x + ETA * residual @ d - ETA * LAMBD).relu(), y)
    dr = ETA * masked @ d.T
    close(masked + dr - dr @ d, dx)
    close(ETA * residual.T @ masked - dr.T @ x, dd)

    k = d - d.T @ d
    close((x + ETA * x @ k - ETA * LAMBD).relu(), y)
    dk = ETA * x.T @ masked
    close(masked + ETA * masked @ k.T, dx)
    close(dk - d @ (dk + dk.T), dd)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_ista_overcomplete(tied):
    steps, x, d, g = 3, drawn(7, 5).requires_grad_(), drawn(5, 11).requires_grad_(), drawn(7, 5)
    decoder = d if tied else drawn(5, 11).requires_grad_()
    codes, residuals = [torch.zeros(7, 11, dtype=torch.float64)], []
    for _ in range(steps):
        residuals.append(x - codes[-1] @ d.T)
        codes.append((codes[-1] + ETA * residuals[-1] @ d - ETA * LAMBD).relu())
    expected = torch.autograd.grad(codes[-1] @ decoder.T, [x, d] if tied else [x, d, decoder], g)

    dx, dd, ddecoder, dz = torch.zeros_like(x), torch.zeros_like(d), g.T @ codes[-1], g @ decoder
    for t in reversed(range(steps)):
        h = dz * (codes[t + 1] > 0)
        dr = ETA * h @ d.T
        dd = dd + ETA * residuals[t].T @ h - dr.T @ codes[t]
        dx, dz = dx + dr, h - dr @ d
    close(dx, expected[0])
    close(dd + ddecoder if tied else dd, expected[1])
    if not tied:
        close(ddecoder, expected[2])
