"""Whether a region runs on several threads or on one, by clocks that the test moves."""

import subprocess
from pathlib import Path

import pytest

from crate_kernels._native import build, compilers

ROOT = Path(__file__).parents[2]
# parallel.cpp is compiled with this clock. stand_still() is a wait, run() work; the helper runs after the caller.
PROGRAM = r"""
#include <cstring>
#include <iostream>
#include <thread>

#include "common/cpu/parallel.h"

int64_t now = 0;
thread_local int64_t ran = 0;
extern "C" int scripted_clock(clockid_t clock, timespec* time) noexcept {
  const int64_t ms = clock == CLOCK_THREAD_CPUTIME_ID ? ran : now;
  *time = {ms / 1000, ms % 1000 * 1000000};
  return 0;
}
namespace torch::stable {
int64_t get_num_threads() { return 2; }
}

void stand_still(int64_t ms) { now += ms; }
void run(int64_t ms) { now += ms, ran += ms; }

int main(int, char** argument) {
  using crate_kernels::Shared;
  const auto has = [&](const char* what) { return std::strcmp(argument[1], what) == 0; };
  now = 1000;
  {
    Shared region;
    {
      const Shared::Worker worker(region);
      run(5);
      if (has("caller")) stand_still(40);
    }
    std::thread([&] {
      const Shared::Worker worker(region);
      run(5);
      if (has("helper")) stand_still(40);
    }).join();
    if (has("start")) stand_still(40);  // of a helper that had no core, and found no tasks
  }
  std::cout << crate_kernels::region_threads();
  now += 16 * 40;
  std::cout << crate_kernels::region_threads() << std::endl;
}
"""
WAITS = {"": "22", "caller": "22", "helper": "12", "start": "12"}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Compile the program, with the clock of parallel.cpp replaced."""
    try:
        command, flags, _ = compilers.find_cxx()
    except build.BuildError as error:
        pytest.skip(f"needs a C++ compiler: {error}")
    folder = tmp_path_factory.mktemp("parallel")
    (folder / "main.cpp").write_text(PROGRAM)
    (folder / "clock.h").write_text(
        '#include <time.h>\nextern "C" int scripted_clock(clockid_t, timespec*) noexcept;\n'
    )
    options = ["-std=c++17", "-pthread", "-DTORCH_TARGET_VERSION=0", "-Dclock_gettime=scripted_clock"]
    options += [f"-I{ROOT / 'tests/tools/standin'}", f"-I{ROOT / 'csrc'}", "-include", folder / "clock.h"]
    sources = [folder / "main.cpp", ROOT / "csrc/common/cpu/parallel.cpp"]
    subprocess.run([*command, *flags, *options, *sources, "-o", folder / "run"], check=True)
    return folder / "run"


@pytest.mark.parametrize(("who", "threads"), WAITS.items(), ids=lambda value: value or "nobody")
def test_one_thread_works_alone_after_a_wait_for_another(who, threads, program):
    """Not after one that the calling thread would have had alone. Said now, and sixteen times the wait later."""
    assert subprocess.run([program, who], capture_output=True, text=True, check=True).stdout == f"{threads}\n"
