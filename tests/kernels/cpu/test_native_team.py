"""An item that runs out of memory, on whichever thread, ends its loop and nothing else."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from novainfer.kernels.cpu import build
from novainfer.kernels.cpu.levels import levels

PROGRAM = r"""
#include <cstdio>
#include <set>
#include <thread>

#include "abi.h"
#include "team.cpp"

int main() {
  std::mutex mutex;
  std::set<std::thread::id> threw;
  for (int round = 0; round < 300; round++) {
    std::atomic<int> begun{0};
    const int status = nova::guarded([&] {
      nova::Team team(4);
      team.loop(64, [&](long i) {
        begun++;
        for (volatile int spin = 0; spin < 20000; spin++) {}
        if (round % 3 != 0 && i % 3 == 0) {
          std::lock_guard<std::mutex> lock(mutex);
          threw.insert(std::this_thread::get_id());
          throw std::bad_alloc();
        }
      });
    });
    if (begun != 64 || status != (round % 3 ? nova::NO_MEMORY : nova::DONE)) return 1;
  }
  printf("%zu\n", threw.size());
  return nova::guarded([] { throw 1; }) == nova::FAILED ? 0 : 2;
}
"""


@pytest.mark.slow
def test_an_item_that_throws_on_any_thread_is_one_error_for_the_caller(tmp_path: Path) -> None:
    if not levels() or shutil.which("g++") is None:
        pytest.skip("nothing can be built here")
    source, program = tmp_path / "team_test.cpp", tmp_path / "team_test"
    source.write_text(PROGRAM)
    command = ["g++", "-O1", "-std=c++17", "-pthread", "-w", f"-I{build.SOURCE_DIR}", "-o", str(program), str(source)]
    subprocess.run(command, check=True, timeout=120)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 1  # threads that threw: the caller and helpers
