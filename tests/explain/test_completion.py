"""`--install-completion`: what TAB offers, asked of a real shell."""

from __future__ import annotations

import shutil
import subprocess
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
    assert offered(file, "python", "/some/main.py", "--lr", "1", "--num-ep") == ["--num_epochs"]
    assert offered(file, "python", "main.py", "pre") == ["predict"]
    assert offered(file, "python", "main.py", "predict", "--o") == ["--output"]
    assert offered(file, "python", "main.py", "--layer", "Kv") == ["KvtAttention"]
    assert offered(file, "python", "main.py", "--calibrate", "") == ["head", "none", "temperature"]
    assert offered(file, "python", "main.py", "--no_aug") == ["--no_augment"]
    assert offered(file, "python", "main.py", "--output_dir", "ru") == []  # files are the shell's
    assert offered(file, "python", "other.py", "--label") == []


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
    assert "install_completion must be bash or zsh, got 'tcsh'" in capsys.readouterr().err
