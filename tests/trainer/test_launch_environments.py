"""Whose process is this: the variables of torchrun, deepspeed and srun."""

from __future__ import annotations

import pytest

from shardzoo.trainer.launch.rank_info import RankInfo, count_threads, first_host

SRUN = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "3(x2),1",
    "SLURM_NODELIST": "gpu[07-09]",
}


def place(launch: RankInfo) -> tuple[int, int, int, int]:
    return launch.rank, launch.world_size, launch.local_rank, launch.local_world_size


def test_nobody():
    assert place(RankInfo.from_environment({})) == (0, 1, 0, 1)


def test_torchrun():
    environ = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert place(RankInfo.from_environment(environ)) == (3, 4, 1, 2)


def test_deepspeed():
    environ = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_SIZE": "2",
        "CROSS_RANK": "1",
    }
    assert place(RankInfo.from_environment(environ)) == (3, 4, 1, 2)


def test_srun(monkeypatch):
    launch = RankInfo.from_environment(SRUN)
    assert place(launch) == (4, 7, 1, 3)
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        monkeypatch.setenv(name, "")  # restored afterwards
    launch.export()
    assert place(RankInfo.from_environment()) == (
        4,
        7,
        1,
        3,
    )  # what torch.distributed and DeepSpeed will read
    assert dict(launch.variables)["MASTER_ADDR"] == "gpu07"
    assert 1024 < int(launch.variables["MASTER_PORT"]) < 32768


def test_the_tasks_of_one_job_meet_at_one_port_and_two_jobs_do_not():
    ports = [
        RankInfo.from_environment(SRUN | {"SLURM_PROCID": rank, "SLURM_JOB_ID": job}).variables[
            "MASTER_PORT"
        ]
        for rank, job in (("0", "71"), ("6", "71"), ("0", "72"))
    ]
    assert ports[0] == ports[1] != ports[2]


def test_srun_with_four_variables_alone():
    environ = {
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": "0",
        "SLURM_NODELIST": "a,b",
    }
    launch = RankInfo.from_environment(environ)
    assert place(launch)[:3] == (0, 2, 0)
    assert launch.variables["MASTER_ADDR"] == "a"


def test_a_step_smaller_than_its_job():
    assert place(RankInfo.from_environment(SRUN | {"SLURM_STEP_NUM_TASKS": "5"}))[:2] == (4, 5)


def test_an_address_that_is_given_is_kept():
    launch = RankInfo.from_environment(SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000"})
    assert (launch.variables["MASTER_ADDR"], launch.variables["MASTER_PORT"]) == (
        "10.0.0.1",
        "5000",
    )


@pytest.mark.parametrize("step", [None, "4294967291"])
def test_a_batch_script_without_srun_is_one_process(step):
    # It has the variables of the first task, but nobody has started the others, for whom it would wait.
    environ = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"} | {
        "SLURM_PROCID": "0"
    }
    environ |= {} if step is None else {"SLURM_STEP_ID": step}
    assert place(RankInfo.from_environment(environ)) == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "x"}, "RANK='x' is not a number of at least 0"),
        ({"RANK": ""}, "RANK='' is not a number"),
        ({"RANK": "-1"}, "RANK='-1' is not a number"),
        ({"RANK": "2"}, "RANK=2 is not a rank of WORLD_SIZE=2 processes"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not a number of at least 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' is not a number of at least 1"),
        ({"LOCAL_RANK": "1.0"}, "LOCAL_RANK='1.0' is not a number"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE='0' is not a number of at least 1"),
        ({"LOCAL_SIZE": "x"}, "LOCAL_SIZE='x' is not a number of at least 1"),
    ],
)
def test_a_variable_that_is_not_a_number_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        RankInfo.from_environment({"RANK": "1", "WORLD_SIZE": "2", **changes})


@pytest.mark.parametrize(
    "name",
    ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_NODEID"],
)
def test_a_variable_of_srun_that_is_not_a_number(name):
    with pytest.raises(ValueError, match="'x' is not a number"):
        RankInfo.from_environment({**SRUN, name: "x"})


@pytest.mark.parametrize(
    ("text", "threads"), [("4", 4), ("4,2", 4), (" 3 , 2,1", 3), ("", 5), (None, 5)]
)
def test_openmps_list_of_threads(text, threads, monkeypatch):
    """A number for each level of nested regions, of which torch's kernels are the first."""
    monkeypatch.setattr("os.cpu_count", lambda: 10)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if text is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert count_threads(2) == threads


@pytest.mark.parametrize("text", ["x", "0", "-1", ",2", "9" * 20])
def test_no_number_of_threads(text, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    with pytest.raises(ValueError, match="is not a number of threads"):
        count_threads(2)


def test_torchrun_inside_srun_is_torchrun():
    environ = SRUN | {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert place(RankInfo.from_environment(environ)) == (1, 2, 1, 2)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[07-09,12]", "gpu07"),
        ("gpu[12,14]", "gpu12"),
        ("rack[1-2]n[04-07,9]-ib,other", "rack1n04-ib"),
        ("a.b-c[3]", "a.b-c3"),
    ],
)
def test_the_first_of_a_list_of_nodes(nodes, first):
    assert first_host(nodes) == first
