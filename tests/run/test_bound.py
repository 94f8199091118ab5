"""What a pass is good for: other contents or another candidate want another pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from phases.base.errors import PlaybookError
from phases.playbook import loader
from phases.run.session import kernel_digest

PLAYBOOK = """
schema: phasegate/playbook/v1
name: bound
kernel: kernel.yaml
embedded_fleet: {workers: [{count: 2}]}
production:
  incumbent: {backend: triton}
  candidate: {backend: mine, packages: [extra], environment: {A: "1"}}
  min_available: {count: 1}
phases:
  sglang-integration:
    incumbent: {backend: triton}
    gate: {rules: [{rule: measurement, metric: logprob_error, at_most: 1, absent: fail}]}
  full-rollout:
    judge: {metrics: [{metric: e2e}]}
"""


def write(repository, *changes: tuple[str, str]) -> loader.Playbook:
    text = PLAYBOOK
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (repository.path / "playbook.yaml").write_text(text)
    return repository.playbook


@pytest.fixture
def extra(repository) -> Path:
    path = repository.path / "extra"
    path.mkdir()
    (path / "pyproject.toml").write_text("[project]\n")
    return path


@pytest.mark.parametrize(
    "change",
    [
        ("backend: mine", "backend: other"),
        ('A: "1"', 'A: "2"'),
        ("{backend: triton}\n  candidate", "{backend: fa3}\n  candidate"),
    ],
)
def test_another_candidate_or_incumbent_wants_another_pass_of_the_production_phases_only(repository, extra, change):
    before, after = write(repository), write(repository, change)
    assert before.phase("full-rollout").digest != after.phase("full-rollout").digest
    assert before.phase("sglang-integration").digest == after.phase("sglang-integration").digest


def test_how_careful_production_is_handled_is_not_what_a_pass_is_bound_to(repository, extra):
    before, after = write(repository), write(repository, ("count: 1}\nphases", "count: 2}\nphases"))
    assert before.phase("full-rollout").digest == after.phase("full-rollout").digest


def test_contents_of_further_distributions_count(repository, extra):
    playbook = write(repository)
    before = kernel_digest(playbook)
    (extra / "kernel.py").write_text("slow = True\n")
    assert kernel_digest(playbook) != before
    assert kernel_digest(write(repository, ("packages: [extra], ", ""))) not in (before, kernel_digest(playbook))


def test_a_package_that_is_not_there_is_a_mistake_of_the_playbook(repository):
    with pytest.raises(PlaybookError, match=r"playbook.yaml:8: .*there is no extra"):
        write(repository)
