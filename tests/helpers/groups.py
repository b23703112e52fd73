"""Which tests share a worker of pytest-xdist, and what becomes of those of a worker that dies."""

from __future__ import annotations

import pytest

FORKING = (
    "test_rank_processes.py",
    "test_tensor_parallel.py",
    "test_serve_command.py",
    "test_deploy.py",
    "test_main.py",
    "test_hostile_run.py",
    "test_kernels.py",
    "test_parallel.py",
)


def _group(nodeid: str) -> str:
    """Tests of a group share what is dear to make, so they run in one worker, and before all that are in none."""
    path, _, test = nodeid.partition("::")
    file = path.rpartition("/")[2]
    if file == "test_accuracy.py":
        return next((model for model in ("gqa", "mla") if f"[{model}" in nodeid), "real")
    if file in ("test_demo_browser.py", "test_small_model.py"):
        return file
    if file in FORKING:
        return "forked"
    if test.startswith("test_chunks_on_a_gpu") or ("far_apart" in nodeid and "[cuda" in test):
        return "large"  # several GB each: a GPU of 80 GB has no room for those of 15 workers at once
    return "demo" if file.startswith("test_demo") else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """By name, as the marker ``xdist_group`` of pytest-xdist 3.8 does nothing in pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

        def remove_node(self, node) -> str | None:
            """Hand out what a dead worker has not run, without the test that it died of, which is returned.

            pytest-xdist hands out all that the worker ever had: who is given tests that have run waits for ever.
            """
            held = self.assigned_work.pop(node)
            died = next((name for unit in held.values() for name, done in unit.items() if not done), None)
            for scope, unit in held.items():
                left = {name: False for name, done in unit.items() if not done and name != died}
                if left:
                    self.workqueue[scope] = left
            for other in self.assigned_work:
                self._reschedule(other)
            return died

    return Groups(config, log)
