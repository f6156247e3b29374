"""Every case in two, three and four processes: equal to one process, or refused."""

import pytest

from tests.distributed import ranks

RUNS = {  # processes, and the modules of the cases; three take the ways of two, but for a rank in the middle
    "two": (2, (*ranks.MODULES, "sharded_cases")),
    "two-train": (2, ("run_cases",)),
    "three": (3, ranks.MODULES),
    "four": (4, ("mesh_cases", "training_cases", "run_cases", "pair_cases")),
}


@pytest.mark.parametrize(
    ("run", "name"),
    [
        pytest.param(run, name, id=f"{run}-{name}", marks=() if run == "two" else pytest.mark.exhaustive)
        for run, (_, modules) in RUNS.items()
        for name in ranks.cases(modules)
    ],
)
def test_several_processes(run, name, request, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):  # of xdist: the folder of all its processes is around this one's
        folder = folder.parent
    chosen = [item.callspec.params for item in request.session.items if item.path == request.path]
    names = [params["name"] for params in chosen if params["run"] == run]
    size, modules = RUNS[run]
    failures = ranks.run_once(folder / f"ranks-{run}", size, names, modules)
    failed = [f"process {rank}:\n{each[name]}" for rank, each in enumerate(failures) if name in each]
    assert not failed, "\n".join(failed)
