"""The command line: what ``info`` says, and that ``verify`` fails where a backend is wrong."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import crate_kernels
from crate_kernels import testing
from crate_kernels._core import backends, measured
from crate_kernels.cli import bench, info, main
from crate_kernels.ops.ista import composite

CASE = next(c for c in testing.cases("ista") if c.name == "few-tokens")


@pytest.fixture
def one_case(monkeypatch):
    monkeypatch.setattr(testing, "CASES", (CASE,))


@pytest.fixture
def away():
    """Offer a backend that is not there."""
    backends.register(backends.Backend("away", "crate_kernels.ops.{op}.composite", missing="no such driver"))
    yield
    backends.unregister("away")


def verify(*options):
    return main(["verify", "--device", "cpu", "--backend", "composite", "--dtype", "fp32", *options])


def printed(capsys):
    return json.loads(capsys.readouterr().out)


FORWARD = composite.forward


def dying(*args):
    raise OverflowError("in the kernel")


BROKEN = {
    "off": (lambda *args: 1.001 * FORWARD(*args), "NO"),
    "not-finite": (
        lambda *args: FORWARD(*args).index_fill(-1, torch.tensor([0]), torch.nan),
        "is not finite where float64 is",
    ),
    "dies": (dying, "OverflowError('in the kernel')"),
}


def test_verify_passes(one_case, capsys):
    assert verify("--json") == 0
    (row,) = printed(capsys)
    assert (row["case"], row["backend"], row["dtype"], row["passed"]) == (str(CASE), "composite", "fp32", True)
    assert 0 < row["error"] <= row["tolerance"]
    assert verify() == 0
    assert "1 passed, 0 failed, on cpu" in capsys.readouterr().out


@pytest.mark.parametrize(("forward", "words"), BROKEN.values(), ids=BROKEN)
def test_verify_fails_where_a_kernel_is_wrong(forward, words, one_case, monkeypatch, capsys):
    monkeypatch.setattr(composite, "forward", forward)
    assert verify() == 1
    out = capsys.readouterr().out
    assert words in out
    assert "0 passed, 1 failed" in out
    assert verify("--json") == 1
    assert [row["passed"] for row in printed(capsys)] == [False]


def test_verify_fails_where_a_gradient_alone_is_no_number(one_case, monkeypatch, capsys):
    """Its share of the tolerance is no number either, which is larger than none."""
    backward = composite.backward
    monkeypatch.setattr(composite, "backward", lambda *args: tuple(g * torch.nan for g in backward(*args)))
    assert verify("--json") == 1
    (row,) = printed(capsys)
    assert (row["output"][0], row["passed"]) == ("d", False)


def test_one_failure_among_many_fails(monkeypatch, capsys):
    monkeypatch.setattr(testing, "CASES", (CASE, next(c for c in testing.CASES if c.name == "many-tokens")))
    forward = composite.forward
    monkeypatch.setattr(composite, "forward", lambda x, *args: forward(x, *args) * (1.001 if len(x) == 2 else 1))
    assert verify("--json") == 1
    assert [row["passed"] for row in printed(capsys)] == [False, True]


NOTHING = {
    "unknown": ("nowhere", "verify: --backend must be one of"),
    "unavailable": ("away", "no backend was asked for that is available"),
    "the-oracle": ("reference", "no backend was asked for that is available"),
}


@pytest.mark.parametrize(("name", "words"), NOTHING.values(), ids=NOTHING)
def test_verifying_nothing_is_no_success(name, words, one_case, away, capsys):
    assert main(["verify", "--device", "cpu", "--backend", name]) == 2
    assert words in capsys.readouterr().out


def test_verify_counts_what_it_leaves_out(monkeypatch, capsys):
    case = next(c for c in testing.cases("mssa") if c.name == "dropout")
    monkeypatch.setattr(testing, "CASES", (CASE, case))
    assert verify() == 0
    assert "excluded, 1 cases: PyTorch's attention draws its own dropout mask" in capsys.readouterr().out


def test_info_says_what_is_available_and_why_not(away, capsys):
    assert main(["info", "--json"]) == 0
    facts = printed(capsys)
    for op in backends.OPS:
        states = facts["operators"][op]
        assert list(states) == list(backends.names())
        assert states["composite"] == {"available": True, "reason": None}
        assert states["away"] == {"available": False, "reason": "no such driver"}
        assert facts["default"]["cpu"][op] == backends.resolve(op, None, torch.device("cpu"), torch.float32)
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert "no such driver" in text
    assert f"torch         {torch.__version__}" in text


@pytest.fixture
def bystander():
    """Offer a backend that lacks nothing but a device."""
    backends.register(backends.Backend("bystander", "crate_kernels.ops.{op}.composite", devices=("npu", "xla")))
    yield
    backends.unregister("bystander")


def test_info_calls_nothing_available_that_has_no_device_here(bystander, monkeypatch, capsys):
    triton, cpp = backends.for_device("triton"), backends.for_device("cpp")
    monkeypatch.setitem(backends._BACKENDS, "triton", replace(triton, devices=("cuda",), missing=None))
    built = replace(cpp, missing=None, on_cuda=replace(cpp.on_cuda, missing=None))
    monkeypatch.setitem(backends._BACKENDS, "cpp", built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["info", "--json"]) == 0
    absent = {"available": False, "reason": "takes cuda tensors, and PyTorch sees no such device"}
    for op, states in printed(capsys)["operators"].items():
        lacking = {"available": False, "reason": f"triton has no {op} kernel yet"}
        assert states["triton"] == (absent if backends._has_kernel[op, "triton"] else lacking)
        assert states["cpp"] == {"available": True, "reason": None, "on_cuda": absent}
        assert states["bystander"]["reason"] == "takes npu or xla tensors, and PyTorch sees no such device"
        assert "on_cuda" not in states["composite"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["info", "--json"]) == 0
    for op, states in printed(capsys)["operators"].items():
        assert states["triton"]["available"] == backends._has_kernel[op, "triton"]
        assert states["cpp"]["on_cuda"] == {"available": True, "reason": None}


NVRTCS = {
    "absent": (None, "nvrtc         none: this PyTorch has no CUDA"),
    "there": (SimpleNamespace(version=(13, 0), architectures=(80, 90)), "nvrtc         13.0, to sm 90, kernels in "),
}


@pytest.mark.parametrize(("found", "expected"), NVRTCS.values(), ids=NVRTCS)
def test_info_says_what_compiles_for_gpus(found, expected, monkeypatch, capsys):
    reason = "this PyTorch has no CUDA" if found is None else None
    monkeypatch.setattr(info.nvrtc, "unavailable_reason", lambda: reason)
    monkeypatch.setattr(info.nvrtc, "library", lambda: found)
    assert main(["info"]) == 0
    assert expected in capsys.readouterr().out
    assert main(["info", "--json"]) == 0
    assert printed(capsys)["nvrtc"].get("reason") == reason


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert not ended.value.code
    assert capsys.readouterr().out == f"crate_kernels {crate_kernels.__version__}\n"


def test_a_reader_that_goes_ends_the_command_without_a_traceback():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "crate_kernels", "info"]
    with open(writing, "wb") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.stderr, done.returncode) == ("", 141)


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA None"])
def test_info_says_whether_a_gpu_was_timed(gpu, monkeypatch, capsys):
    classes = len(measured.read(gpu))
    facts = info.collect() | {"gpus": [{"name": gpu, "capability": "9.0", "memory_gib": 1.0, "classes": classes}]}
    monkeypatch.setattr(info, "collect", lambda: facts)
    assert main(["info"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("gpu ")]
    assert line.endswith(f"by its times, {classes} classes of calls take another backend (docs/gpu.md)" * bool(classes))
    assert ("by its times" in line) == (gpu == "NVIDIA H200")


EXTENSIONS = {
    "absent": (True, "python -m crate_kernels build, with a C++ compiler installed (no compiler)"),
    "no sources": (False, "install from a source distribution: the C++ sources are not here"),
}


@pytest.mark.parametrize(("sources", "advice"), EXTENSIONS.values(), ids=EXTENSIONS)
def test_info_says_how_to_get_the_extension(sources, advice, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(info._extension, "PATH", None)
    monkeypatch.setattr(info._extension, "MISSING", "no compiler")
    monkeypatch.setattr(info.libraries, "source_folder", lambda: tmp_path if sources else None)
    assert main(["info", "--json"]) == 0
    assert printed(capsys)["extension"] == {"path": None, "advice": advice}
    assert main(["info"]) == 0
    assert f"extension     not built; to get it: {advice}" in capsys.readouterr().out


def test_info_says_that_kernels_are_kept_nowhere(monkeypatch):
    def nowhere():
        raise info.libraries.BuildError("no home")

    monkeypatch.setattr(info.nvrtc, "unavailable_reason", lambda: None)
    monkeypatch.setattr(info.nvrtc, "library", lambda: SimpleNamespace(version=(12, 8), architectures=(80,)))
    monkeypatch.setattr(info.cubins, "folder", nowhere)
    assert info._nvrtc_facts() == {"version": "12.8", "architectures": (80,), "kept": "nowhere: no home"}


def test_facts_of_a_gpu(monkeypatch):
    properties = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=139.8 * 2**30
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert info._gpu(0) == {
        "name": "NVIDIA H200", "capability": "9.0", "multiprocessors": 132, "memory_gib": 139.8,
        "classes": len(measured.read("NVIDIA H200")),
    }  # fmt: skip


def test_info_prints_every_fact(monkeypatch, capsys):
    facts = info.collect()
    gpu = {"name": "a GPU", "capability": "9.0", "memory_gib": 1.5, "classes": 0}
    facts |= {"gpus": [gpu], "versions": facts["versions"] | {"triton": None, "hip": "6"}}
    monkeypatch.setattr(info, "collect", lambda: facts)
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cpu = facts["cpu"]
    for line in (
        "triton        not installed",
        "hip           6",
        f"cpu           {cpu['machine']}, {cpu['capability']}, {torch.get_num_threads()} threads",
        "gpu           a GPU, sm 9.0, 1.5 GiB",
        "backend=None picks:",
        "  cpu: " + ", ".join(f"{op} {name}" for op, name in facts["default"]["cpu"].items()),
    ):
        assert line in lines


def test_verify_checks_what_it_is_asked_to(monkeypatch, capsys):
    cases = [next(iter(testing.cases(op))) for op in ("mssa", "ista")]
    monkeypatch.setattr(testing, "CASES", tuple(cases))
    seen = []
    check = "crate_kernels.cli.verify._check"
    monkeypatch.setattr(check, lambda case, dtype, device, only, excluded: seen.append((case.op, dtype, only)) or [])
    main(["verify", "--device", "cpu", "--op", "ista", "--dtype", "bf16", "--backend", "composite"])
    assert seen == [("ista", "bf16", ["composite"])]
    seen.clear()
    main(["verify", "--device", "cpu"])
    assert seen == [(op, dtype, None) for dtype in ("fp32", "bf16", "fp16") for op in ("mssa", "ista")]


REFUSED = {
    "bench --backend nope": "crate_kernels bench: error: argument --backend: invalid choice: 'nope' (choose from",
    "bench --nope 1": "crate_kernels bench: error: an option must be one of --help, --quick, --full, --op, --backend,",
    "bench --output compare --nope": "crate_kernels bench: error: an option must be one of --help, --quick, --full,",
    "bench compare a b --nope=1": "crate_kernels bench compare: error: an option must be one of --help, --min-change,",
    "tune --backend nope": "crate_kernels tune: error: an option must be one of --help, --op, --candidates,",
    "demo --dtype nope": "crate_kernels demo: error: an option must be one of --help, --output, --quick, --fresh,",
    "--nope": "crate_kernels: error: an option must be one of --help, --version, got --nope",
}


@pytest.mark.parametrize(
    ("line", "message", "then"),
    [
        ("bench compare absent.json absent.json --least=2", "--least is now --min-change", "No such file"),
        ("tune --most 3", "--most is now --max-configs", "tune: needs a CUDA or HIP GPU"),
    ],
)
def test_the_former_name_of_an_option_warns(line, message, then, capsys, monkeypatch):
    """What comes then is the subcommand's error: the option has been taken."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(FutureWarning, match=f"^{message}$"):
        assert main(line.split()) != 0
    assert then in capsys.readouterr().out


@pytest.mark.parametrize("line", REFUSED)
def test_an_argument_that_a_subcommand_does_not_know(line, capsys):
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    assert REFUSED[line] in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("demo --backend nope", "demo: --backend must be one of triton, cpp, composite, reference, got 'nope'"),
        ("icl --device nope", "icl: --device nope cannot be used: Expected one of cpu, cuda,"),
    ],
)
def test_experiments_name_the_argument_that_they_refuse(line, words, capsys):
    assert main(line.split()) == 2
    assert capsys.readouterr().err.startswith(words)


@pytest.mark.parametrize("device", ["nope", "meta", "cuda:99"])
def test_verify_names_a_device_that_cannot_be_used(device, capsys):
    assert main(["verify", "--device", device]) == 2
    assert capsys.readouterr().out.startswith(f"verify: --device {device} cannot be used: ")


def test_verify_leaves_out_what_a_backend_refuses(one_case, monkeypatch, capsys):
    def refused(*args):
        raise NotImplementedError("composite: not this one")

    monkeypatch.setattr(composite, "forward", refused)
    assert verify() == 2
    assert "excluded, 1 cases: composite: not this one" in capsys.readouterr().out


def test_plot_names_the_package_that_it_needs(tmp_path, monkeypatch, capsys):
    path = tmp_path / "results.json"
    path.write_text('{"machine": {"device": "a"}, "rows": []}')
    monkeypatch.setitem(sys.modules, "crate_kernels.bench.drawing", None)
    monkeypatch.delattr("crate_kernels.bench.drawing", raising=False)
    assert main(["plot", str(path)]) == 2
    assert capsys.readouterr().out.startswith("plot: needs ")


@pytest.mark.parametrize("wrong", [False, True])
def test_bench_without_a_file_to_write_prints_alone(wrong, tmp_path, monkeypatch, capsys, threads):
    threads(1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench.load, "measure", lambda: bench.load.Load(2, 2.0))
    facts = {"device": "a CPU", "processor": "of some make", "torch": "2", "product_flops": {}, "copy_bytes": 1e10}
    monkeypatch.setattr(bench.rows, "machine", lambda device, dtypes: {**facts, "dtypes": dtypes})
    bad = bench.BenchRow("tssa", "tssa", "small", "fp32", "forward", "composite", skipped="wrong: far off")
    monkeypatch.setattr(bench, "_rows", lambda *_: [bad] * wrong)
    assert main(["bench", "--quick", "--device", "cpu"]) == wrong
    assert (f"bench: {bad.key} is wrong: far off" in capsys.readouterr().out) == wrong
    assert list(tmp_path.iterdir()) == []
