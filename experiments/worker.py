"""A process that has loaded torch and done nothing with it yet, and forks one process for each run.

`compare` starts it as `python -m experiments.worker MODULE ...` and talks in lines of JSON: a job in, who ended out. Start-up is paid
once so. NOTE: it must neither compute nor search: OpenMP's threads do not survive a fork, and a child that needs them would wait
for ever. When its input ends, because `compare` was stopped or killed, every run is told to save and stop.

On a machine of a cluster it is `python -m experiments.worker --alone`: one job, one run, no fork.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import config as flags
from experiments.cells import Place, claimed, note_failure, note_start, note_time, read_note, state_of
from experiments.executors.base import ELSEWHERE
from inputs import files, store
from run.directory import RESULTS
from run.plugin import plugin_frame
from run.run import run
from utils import BadOption, Halt, Stopped, say, shortened


def serve() -> None:
    """Reads jobs, forks, tells who ended; until the input ends and no child is left."""
    children: dict[int, str] = {}
    waking, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all: `compare` decides what it means
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(waking, selectors.EVENT_READ)
    waiting = b""
    tell({"ready": os.getpid()})
    while selector.get_map() and (0 in selector.get_map() or children):
        for key, _ in selector.select():
            text = os.read(key.fd, 1 << 16)
            if key.fd == waking:
                continue
            if not text:
                selector.unregister(0)
                for child in children:
                    os.kill(child, signal.SIGTERM)
            *lines, waiting = (waiting + text).split(b"\n")
            for line in lines:
                job = json.loads(line)
                if child := os.fork():
                    children[child] = job["run"]
                else:
                    os._exit(in_child(job, (waking, wake)))
        for child in list(children):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                tell({"run": children.pop(child), "code": os.waitstatus_to_exitcode(status)})


def tell(line: Mapping[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(1, (json.dumps(line) + "\n").encode())


def alone() -> int:
    """The job on the first line of the input, in this very process. When the input ends, it is told to save and stop."""
    # Ctrl-C on a terminal, and Slurm's SIGUSR2, reach every process, and are for the one that started this: it closes the input.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGUSR2))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
    job, handle = json.loads(sys.stdin.buffer.readline()), os.dup(0)

    def obey() -> None:
        while os.read(handle, 1 << 12):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=obey, daemon=True).start()
    return in_child(job, ())


def in_child(job: Mapping[str, Any], pipes: tuple[int, ...]) -> int:
    """A forked process: its own signals and files, then the job."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    for handle in pipes:
        os.close(handle)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    try:
        return work(job)
    except BaseException as error:
        say(told(error))
        return 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()


def work(job: Mapping[str, Any]) -> int:
    """One run of a comparison, unless somebody else works on it or it is done."""
    place, made_with = Place(job["arm"], job["seed"], Path(job["run"])), job["made_with"]
    with claimed(place) as ours:
        if not ours:
            return ELSEWHERE
        log = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | files.NO_FOLLOW, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        torch.set_num_threads(job["threads"])
        return to_the_end(place, made_with, job["flags"], again=job["again"])


def to_the_end(place: Place, made_with: Mapping[str, str], given: Mapping[str, Any], *, again: bool) -> int:
    """Begins, or goes on where the run was stopped. What was made with other code or data is begun anew."""
    state, finished = state_of(place, made_with, ours=True), (place.run / RESULTS).exists()
    if state == "done" or ((finished or state == "failed") and not again):
        return 0
    note = read_note(place)
    same = note.get("made_with") == dict(made_with)
    goes_on = same and not finished and (place.run / "checkpoints" / "last" / store.INDEX).exists()
    note_start(place, made_with, seconds=note.get("seconds", 0.0) if goes_on else 0.0)
    begun = time.perf_counter()
    typed = {name: given[name] for name in ("plugin", "tracker") if given.get(name)}
    if goes_on:
        words, action = typed, flags.Action(resume=str(place.run))
    else:
        words, action = {**given, "output_dir": str(place.run)}, flags.Action(overwrite=place.run.exists())
    sys.argv = ["main.py", *command_line(words, action)]
    say(f"$ python {' '.join(sys.argv)}")
    try:
        run(words, action)
    except Stopped as stop:
        say(str(stop))
        return stop.exit_code
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        line = told(error)
        note_failure(place, line, 1)
        say(line)
        return 1
    finally:
        note_time(place, time.perf_counter() - begun)
    return 0


def told(error: BaseException) -> str:
    """An error on one line; where the toolkit did not foresee it, the log has all of it."""
    if isinstance(error, BadOption):
        return f"error: {'--' if error.option in flags.FIELDS else ''}{error}"
    if isinstance(error, Halt):
        return shortened(error, 300)
    if where := plugin_frame(error):
        return f"error: plugin {where}: {type(error).__name__}: {shortened(error, 300)}"
    traceback.print_exc()
    return f"error: {type(error).__name__}: {shortened(error, 300)}"


def command_line(given: Mapping[str, Any], action: flags.Action) -> list[str]:
    """What a user would type for this run."""
    words = [word for name, value in given.items() for word in flag_words(name, value)]
    words += ["--resume", action.resume] if action.resume else []
    return [*words, "--overwrite"] if action.overwrite else words


def flag_words(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", str(value)]


if __name__ == "__main__":
    if sys.argv[1:] == ["--alone"]:
        sys.exit(alone())
    for module in sys.argv[1:]:  # what the runs will load anyway
        importlib.import_module(module)
    serve()
