"""`--install-completion`: what TAB offers, asked of a real shell."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from main import main


def offered(file: Path, *words: str) -> list[str]:
    """What bash would show behind these words, the last of which is being typed."""
    typed = " ".join(f"'{word}'" for word in words)
    code = f'source "{file}"; COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _neighbor_attention; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return sorted(done.stdout.split())


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
def test_bash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".bashrc").write_text("alias mine=ls")
    for _ in range(2):  # a second time changes nothing
        assert main(["--install-completion", "bash"]) == 0
    file = tmp_path / ".local" / "share" / "neighbor-attention" / "completion.sh"
    assert (tmp_path / ".bashrc").read_text() == f"alias mine=ls\nsource {file}\n"
    assert f"completion: written to {file}" in capsys.readouterr().out
    assert offered(file, "python", "main.py", "--label") == ["--label_bias", "--label_noise", "--label_smoothing"]
    assert offered(file, "python", "/some/main.py", "--lr", "1", "--num-ep") == ["--num-epochs"]  # as it was typed
    assert offered(file, "python", "main.py", "--no-label_n") == []  # half and half, as no flag is
    assert offered(file, "python", "main.py", "pre") == ["predict"]
    assert offered(file, "python", "main.py", "predict", "--o") == ["--output"]
    assert offered(file, "python", "main.py", "--layer", "Kv") == ["KvtAttention"]
    assert offered(file, "python", "main.py", "--calibrate", "") == ["head", "none", "temperature"]
    assert offered(file, "python", "main.py", "--no_aug") == ["--no_augment"]
    assert offered(file, "python", "main.py", "--output_dir", "ru") == []  # files are the shell's
    assert offered(file, "python", "other.py", "--label") == []


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
def test_fish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert main(["--install-completion", "fish"]) == 0
    file = tmp_path / ".config" / "fish" / "conf.d" / "neighbor-attention.fish"
    assert f"completion: written to {file}; start a new fish" in capsys.readouterr().out

    def found(line: str) -> list[str]:
        """A new fish reads the file by itself."""
        done = subprocess.run(["fish", "-c", f"complete -C '{line}'"], capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return sorted(done.stdout.split())

    assert found("python main.py --label") == ["--label_bias", "--label_noise", "--label_smoothing"]
    assert found("python3 /some/main.py --lr 1 --num-ep") == ["--num-epochs"]
    assert found("python main.py pre") == ["predict"]
    assert found("python main.py predict --o") == ["--output"]
    assert found("python main.py --layer Kv") == ["KvtAttention"]
    assert found("python main.py --calibrate ") == ["head", "none", "temperature"]
    assert found("python main.py --output_dir ru") == ["runs/"]  # files are the shell's
    assert found("python other.py --label") == []


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")
def test_zsh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal of its own: zsh completes nowhere else."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".zshrc").write_text("PROMPT='ready> '\n")
    assert main(["--install-completion", "zsh"]) == 0
    process, terminal = pty.fork()
    if process == 0:
        os.execvpe("zsh", ["zsh", "-i"], {**os.environ, "TERM": "dumb", "ZDOTDIR": str(tmp_path)})
    try:
        until(terminal, "ready> ")
        words = {"--label_n": "--label_noise", "--num-ep": "--num-epochs", "--layer Kv": "--layer KvtAttention", "pre": "predict"}
        for typed, shown in words.items():
            os.write(terminal, f"python main.py {typed}\t".encode())
            until(terminal, f"python main.py {shown} ")
            os.write(terminal, b"\x15")  # the line is deleted
    finally:
        os.close(terminal)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def until(terminal: int, text: str) -> None:
    """Reads what a terminal shows until the text is there."""
    shown, end = "", time.monotonic() + 60
    while text not in shown:
        assert time.monotonic() < end, shown
        if select.select([terminal], [], [], 1)[0]:
            shown += os.read(terminal, 1 << 16).decode(errors="replace")


def test_what_is_shown_is_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/usr/bin/zsh")
    assert main(["--install-completion"]) == 0
    capsys.readouterr()
    assert main(["--show-completion"]) == 0
    shown = capsys.readouterr().out
    assert (tmp_path / ".local/share/neighbor-attention/completion.sh").read_text().strip() == shown.strip()
    assert "bashcompinit" in shown
    assert (tmp_path / ".zshrc").exists()


def test_another_shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--install-completion", "tcsh"]) == 2
    assert "install_completion must be one of bash, zsh, fish, got 'tcsh'" in capsys.readouterr().err
