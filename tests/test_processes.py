"""The batch command under two real processes of four devices each, over loopback."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from glm5next_jax.batch.__main__ import main

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "tiny-glm53-flash"
HEARTBEAT = 10
OPTIONS = ["--dtype", "float32", "--max-new-tokens", "4", "--batch-size", "4", "--chunk-size", "16"]


def write_requests(path: pathlib.Path, count: int) -> None:
    prompts = [[(7 * i + t) % 250 for t in range(7 + i % 9)] for i in range(count)]
    lines = [{"id": i, "token_ids": prompt} for i, prompt in enumerate(prompts)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(process: int, port: int, arguments: list[str]) -> subprocess.Popen[str]:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
    }
    flags = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", "2"]
    flags += ["--process-id", str(process), "--heartbeat", str(HEARTBEAT)]
    return subprocess.Popen(
        [sys.executable, "-m", "glm5next_jax.batch", *arguments, *flags],
        cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.slow
def test_two_processes_answer_as_one_does(tmp_path):
    requests, alone, together = (tmp_path / name for name in ("in.jsonl", "one", "two"))
    write_requests(requests, 4)
    common = ["--model", str(EXAMPLE), "--input", str(requests), *OPTIONS]
    assert main([*common, "--output", str(alone), "--quiet"]) == 0

    arguments = [*common, "--output", str(together), "--mesh", "data=4,model=2"]
    port = free_port()
    processes = [start(i, port, arguments) for i in range(2)]
    outputs = [process.communicate(timeout=400) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert together.read_text() == alone.read_text()
    # The first process alone tells how it went.
    assert "2 processes, 8 devices" in outputs[0][1] and "4 answers" in outputs[0][1]
    assert "answers" not in outputs[1][1]
    assert not together.with_name("two.partial").exists()


@pytest.mark.slow
def test_a_lost_process_ends_the_others(tmp_path):
    """Killed between two batches; what the first process had finished is kept."""
    requests, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_requests(requests, 400)  # minutes of work
    arguments = ["--model", str(EXAMPLE), "--input", str(requests), "--output", str(output)]
    arguments += [*OPTIONS, "--mesh", "data=4,model=2"]
    partial = output.with_name("out.jsonl.partial")
    port = free_port()
    first, second = (start(i, port, arguments) for i in range(2))
    try:
        deadline = time.monotonic() + 300
        while not partial.exists() or not partial.read_text():
            assert first.poll() is None and time.monotonic() < deadline, first.communicate()
            time.sleep(0.2)
        second.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        _, errors = first.communicate(timeout=HEARTBEAT + 30)
        assert time.monotonic() - killed < HEARTBEAT + 30
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()
    assert first.returncode != 0
    assert "start all of them again with --overwrite" in errors.lower()
    kept = [json.loads(line) for line in partial.read_text().splitlines()]
    assert kept and all(1 <= answer["num_new_tokens"] <= 4 for answer in kept)
    assert len({answer["id"] for answer in kept}) == len(kept)
    assert not output.exists()


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            ["--mesh", "model=0"],
            "expected data=N,model=M with N and M of at least 1, got 'model=0'",
        ),
        (["--mesh", "heads=2"], "expected data=N,model=M"),
        (["--mesh", "model=16"], "a mesh of data=1 x model=16 needs 16 devices, but there are 8"),
        (["--mesh", "model=8"], "does not divide over the mesh axis model = 8"),
        (["--coordinator", "h:1"], "--coordinator, --num-processes and --process-id go together"),
        (
            ["--coordinator", "h:1", "--num-processes", "2", "--process-id", "2"],
            "--process-id 2 is not in 0..1",
        ),
        (["--heartbeat", "0"], "--heartbeat must be at least 1 second, got 0"),
        (["--weights", "fp8", "--mesh", "model=2"], "FP8 blocks of"),
    ],
)
def test_wrong_flags_are_refused(tmp_path, capsys, flags, message):
    requests = tmp_path / "in.jsonl"
    write_requests(requests, 1)
    arguments = ["--model", str(EXAMPLE), "--input", str(requests), "--output", str(tmp_path / "o")]
    try:
        status = main([*arguments, *flags])
    except SystemExit as error:  # argparse's own refusals
        status = error.code
    assert status == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
