"""What a release rests on: hashes of the pins, and workflows that may do little and run what exists."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
UNLOCKED = {"torch", "torchvision", "triton"}  # which build is right depends on the machine

if not WORKFLOWS:
    pytest.skip("needs a checkout", allow_module_level=True)


def pins(name):
    """Return the version of each package in a file of pins."""
    lines = re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / name).read_text(), re.MULTILINE)
    return {re.sub(r"[._]", "-", package.lower()): version for package, version in lines}


def test_every_pin_has_hashes():
    wanted = {name: version for name, version in pins("constraints.txt").items() if name not in UNLOCKED}
    assert pins("requirements.lock") == wanted, "make lock writes it"
    entries = re.split(r"^(?=\w)", (ROOT / "requirements.lock").read_text(), flags=re.MULTILINE)[1:]
    assert len(entries) == len(wanted)
    assert [entry for entry in entries if not re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry)] == []


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_source_distribution_has_what_its_tests_and_targets_read(tmp_path):
    """Everything but what GitHub and git read."""
    pytest.importorskip("setuptools", "77", reason="needs setuptools: pip install setuptools")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("needs a clone")
    tracked = {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}
    for name in tracked:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    subprocess.run([sys.executable, "setup.py", "-q", "egg_info"], cwd=tmp_path, check=True, capture_output=True)
    packed = set((tmp_path / "crate_kernels.egg-info" / "SOURCES.txt").read_text().splitlines())
    assert {name for name in tracked - packed if not name.startswith(".git")} == set()


def test_tools_that_a_target_installs_are_pinned():
    install = re.search(r"^\t\$\(SHIP\).*pip install -c constraints.txt (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert install is not None
    assert set(install[1].split()) <= pins("constraints.txt").keys()


@pytest.fixture(params=WORKFLOWS, ids=lambda path: path.stem)
def workflow(request):
    yaml = pytest.importorskip("yaml", reason="needs PyYAML: pip install '.[docs]'")
    return yaml.safe_load(request.param.read_text())


def steps(workflow):
    """List the steps of every job."""
    return [step for job in workflow["jobs"].values() for step in job.get("steps", ())]


def test_a_workflow_may_read_and_no_more(workflow):
    """A job that may write says so itself, and needs another that may not, which made what it writes."""
    assert workflow["permissions"] == {"contents": "read"}
    longest = 350 if "schedule" in workflow[True] else 120  # minutes; YAML reads the key "on" as True
    for job in workflow["jobs"].values():
        assert "permissions" not in job or (job["needs"] and "contents" not in job["permissions"])
        assert "uses" in job or job["timeout-minutes"] <= longest


def test_actions_are_of_one_commit(workflow):
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert [name for name in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", name)] == []
    for step in steps(workflow):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"] == {"persist-credentials": False}


def made_by(words, job):
    """List the targets of a call of make; one that is a variable is every value of the job's matrix by that name."""
    matrix = job.get("strategy", {}).get("matrix", {})
    targets = [word for word in words if not re.match(r"[A-Z]+=", word)]
    return [name for word in targets for name in (matrix[word[1:].lower()] if word.startswith("$") else [word])]


def test_what_a_workflow_runs_is_there(workflow):
    made = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for job in workflow["jobs"].values():
        for step in job.get("steps", ()):
            words = shlex.split(step.get("run", ""))
            if words[:1] == ["make"]:
                assert set(made_by(words[1:], job)) <= set(made)
    for step in steps(workflow):
        words = step.get("run", "").split()
        assert "${{" not in step.get("run", ""), "an expression in a script is executed: pass it in env"
        for word in words:
            if re.match(r"(tests|\.ci)/", word):
                assert (ROOT / word).exists()
