"""Reviewing and deciding at a terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest


class Terminal:
    """`phase ARGUMENT...` at a terminal of 110 columns."""

    def __init__(self, directory, *arguments):
        self.leader, follower = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "phases.cli.main", *arguments],
            cwd=directory,
            stdin=follower,
            stdout=follower,
            stderr=follower,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "110", "NO_COLOR": "1"},
            close_fds=True,
        )
        os.close(follower)
        self.text = ""

    def read_until(self, words, seconds=200):
        until = time.monotonic() + seconds
        while words not in self.text:
            assert time.monotonic() < until, self.text
            if not select.select([self.leader], [], [], 0.5)[0]:
                continue
            try:
                chunk = os.read(self.leader, 65536)
            except OSError:
                break
            if not chunk:
                break
            self.text += chunk.decode()
        assert words in self.text, self.text

    def type(self, text):
        os.write(self.leader, text.encode())

    def end(self):
        code = self.process.wait(200)
        while select.select([self.leader], [], [], 0.2)[0]:
            try:
                self.text += os.read(self.leader, 65536).decode()
            except OSError:
                break
        os.close(self.leader)
        return code


@pytest.fixture
def review(repository):
    repository.run()
    return Terminal(repository.path, "gate", "review")


def test_approved_where_it_was_read(review, phase):
    review.read_until("[a/r/Enter]")
    assert (
        review.text.index("PASS  0001-build-parity-PASS  waiting for review")
        < review.text.index("Rules")
        < review.text.index("Provenance")
    )
    review.type("a\n")
    review.read_until("Why?")
    review.type("4x and right\n")
    review.read_until("approved by Ada")
    assert review.end() == 0
    (row,) = phase.json("status")["phases"]
    assert row["state"] == "approved" and row["approvals"][0]["reason"] == "4x and right"
    shown = phase("gate", "review").stdout
    assert "approve: Ada <ada@example.org>" in shown and "To decide" not in shown


def test_rejected_where_it_was_read(review, phase):
    review.read_until("[a/r/Enter]")
    review.type("reject\n")
    review.read_until("Why?")
    review.type("slower at q65\n")
    assert review.end() == 0 and phase.json("status")["phases"][0]["state"] == "rejected"


@pytest.mark.parametrize(("typed", "code"), [("\n", 0), ("y\n", 0), ("\x04", 0), ("a\n", -signal.SIGINT)])
def test_anything_else_decides_nothing(review, phase, typed, code):
    review.read_until("[a/r/Enter]")
    review.type(typed)
    if code == -signal.SIGINT:
        review.read_until("Why?")
        while (
            review.process.poll() is None
        ):  # one that comes right between the question and the reading of the answer is only seen with the next key
            review.process.send_signal(signal.SIGINT)
            time.sleep(0.5)
    assert review.end() == (code if code >= 0 else 1)
    assert "Traceback" not in review.text and phase.json("status")["phases"][0]["state"] == "waiting for review"


def test_no_question_without_a_terminal_or_when_it_is_not_wanted(repository, phase):
    repository.run()
    digest = phase.json("checkpoint", "list")["checkpoints"][0]["digest"][:16]
    assert (
        f"phase gate approve 1 --digest {digest} --reason" in phase("gate", "review").stdout
        and "phase gate reject 1" in phase("gate", "review").stdout
    )
    terminal = Terminal(repository.path, "gate", "review", "--no-ask")
    terminal.read_until("phase gate reject 1")
    assert terminal.end() == 0


def test_what_did_not_pass_is_not_asked_about(repository, phase):
    path = repository.path / "playbook.yaml"
    path.write_text(path.read_text().replace("variants: [vectorised]", "variants: [rows]"))
    repository.run()
    terminal = Terminal(repository.path, "gate", "review")
    terminal.read_until("Nothing to approve")
    assert (
        terminal.end() == 0
        and "`phase run build-parity`" in terminal.text
        and "waiting for review" not in terminal.text
    )
