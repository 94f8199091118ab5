"""The steps of Phase 2; `phases.sglang_integration` puts them in order.

A fault of the incumbent, of the environment or of this toolkit ends the run with an error. A fault of the candidate is a
result: it is kept with its reason and the last lines of the log, what cannot be measured then is left out, and the gate
fails on `candidate_ready` (or on what is missing).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phases.base.errors import BuildError, ServingError
from phases.base.files import write_json
from phases.base.results import Measurement, Results
from phases.build_parity.steps import build_cache
from phases.harness import contract
from phases.harness.contract import Kernel
from phases.ledger.checkpoint import RESULTS
from phases.run.phase_run import PhaseRun, load_results
from phases.run.steps import Facts, Step, StepContext
from phases.serving import latency, log_scan, outputs
from phases.serving.activity import inactive, read_activity, read_metrics, summarize
from phases.serving.client import Client, ScoringError
from phases.serving.environment import environment_facts
from phases.serving.host import LocalHost, Server, ServingHost
from phases.serving.launch import server_argv, server_environment
from phases.serving.prompts import Prompt, load_prompts
from phases.serving.readiness import await_ready, evidence
from phases.serving.release import make_release
from phases.serving.settings import EMBEDDED, IntegrationSettings
from phases.serving.target import Problem, import_objects, missing_libraries, versions, wrong_architecture
from phases.sglang_integration import report

ENVIRONMENT = "provision the serving environment"
RELEASES = "make the releases"
OBJECTS = "load the releases in the serving environment"
SERVERS = "start both servers"
READY = "wait for completions"
OUTPUTS = "compare outputs and accept length"
LATENCY = "compare latency"
LOGS = "scan the logs"
STOP = "stop the servers"
REPORT = "write the report"
SIDES = ("incumbent", "candidate")
SERIES = (
    "sglang:generation_tokens_total",
    "sglang:prompt_tokens_total",
    "sglang:num_requests_total",
    "sglang:spec_accept_length",
)
LOG_TAIL = 200
ANSWERS = "answers.json"


def serving_host(run: PhaseRun) -> ServingHost:
    """Where this run's servers live."""
    return LocalHost(run.work / "serving")


def provision(run: PhaseRun) -> Step:
    """The environment, made or checked, and its versions."""
    settings: IntegrationSettings = run.settings

    def prepare(context: StepContext) -> Facts:
        _prompts(run)  # before the minutes that servers take to start
        facts = environment_facts(settings.server, context.progress)
        found = versions(serving_host(run), facts["python"])
        context.progress(f"SGLang {found['sglang']}, torch {found['torch']}, {found['gpu'] or found['machine']}")
        return {**facts, "versions": found, "manifest": {"serving": found, "serving_environment": facts.get("digest")}}

    what = (
        "SGLang on the CPU, from the cache or made now"
        if settings.server.python == EMBEDDED
        else settings.server.python
    )
    return Step(ENVIRONMENT, what, prepare, holds=lambda context, facts: Path(facts["python"]).exists())


def make_releases(run: PhaseRun) -> Step:
    """One release a side: wheel and objects, installed beside each other."""

    def make(context: StepContext) -> Facts:
        host, facts = serving_host(run), {}
        for side in _released(run):
            kernel = _kernel(run, side)
            try:
                bundle, records = make_release(
                    kernel, _architectures(run, kernel), build_cache(kernel), context.progress, _packages(run, side)
                )
            except BuildError as fault:
                if side == "incumbent":
                    raise
                return {**facts, **_failed(f"the candidate's release does not build: {fault.message}")}
            path = host.install(bundle)
            context.progress(f"{side}: release {bundle.digest[:12]}, {bundle.size >> 10} KiB")
            facts[side] = {
                "digest": bundle.digest,
                "path": str(path),
                "archs": sorted({record.arch for record in records}),
            }
        return facts

    def holds(context: StepContext, facts: Facts) -> bool:
        return all(side in facts and (Path(facts[side]["path"]) / ".complete").exists() for side in _released(run))

    return Step(RELEASES, "wheel and objects of incumbent and candidate, side by side", make, holds=holds)


def load_objects(run: PhaseRun) -> Step:
    """Import each release in a process of the serving environment: ABI, libraries, architecture."""

    def load(context: StepContext) -> Facts:
        if failure(context):
            return {}
        host, found = serving_host(run), context.facts[ENVIRONMENT]
        python, facts = found["python"], {}
        for side in _released(run):
            release, kernel = context.facts[RELEASES][side], _kernel(run, side)
            path = Path(release["path"])
            answer = import_objects(host, python, kernel, path, server_environment(run, side, release, found))
            problem = answer if isinstance(answer, Problem) else _unfit(run, host, release, found, answer["loaded"])
            if problem and side == "incumbent":
                raise ServingError(
                    f"the incumbent does not load: {problem.reason}",
                    hint="Mend it first: there is nothing to compare with.",
                )
            if problem:
                return {**facts, **_failed(problem.reason, problem.evidence)}
            facts[side] = {"loaded": answer["loaded"]}  # type: ignore[index]
        return facts

    return Step(OBJECTS, "ABI, shared libraries and architecture, before a server is risked", load)


def start_servers(run: PhaseRun) -> Step:
    """Both servers, with the same flags."""

    def start(context: StepContext) -> Facts:
        host, found, facts = serving_host(run), context.facts[ENVIRONMENT], {}
        for left in host.left_running():
            host.stop(left)
        if failure(context):
            return {}
        ports = _ports(run, host)
        for side, port in ports.items():  # both before any server is started
            reason = f"port {port} of the {side} is taken"
            if host.port_taken(port) and side == "incumbent":
                raise ServingError(f"{reason}.", hint="Set `incumbent.port: 0` for any free port.")
            if host.port_taken(port):
                return _failed(reason)
        for side, port in ports.items():
            release = context.facts[RELEASES].get(side)
            argv = server_argv(run, side, found, port)
            server = host.start(side, argv, server_environment(run, side, release, found), port)
            context.progress(
                f"{side}: pid {server.pid}, port {port}, log {min(server.log, os.path.relpath(server.log), key=len)}"
            )
            facts[side] = asdict(server)
        return facts

    def holds(context: StepContext, facts: Facts) -> bool:
        host = serving_host(run)
        return all(side in facts and host.alive(Server(**facts[side])) for side in SIDES)

    return Step(SERVERS, "incumbent and candidate with the same flags, on free ports", start, holds=holds)


def await_completions(run: PhaseRun) -> Step:
    """Ready is who completes our requests, and runs what it should."""

    def wait(context: StepContext) -> Facts:
        if failure(context):
            return {}
        host, facts = serving_host(run), {}
        for side in SIDES:
            server, client = _server(context, side), _client(run, context, side)
            within = getattr(run.settings, side).ready_within or run.settings.server.ready_within
            found = await_ready(host, server, client, within, context.clock)
            if not found.ready and side == "incumbent":
                raise ServingError(
                    f"the incumbent is not ready: {found.reason}",
                    hint=f"See {server.log}; the candidate was not judged.",
                )
            if not found.ready:
                return {**facts, **_failed(found.reason, found.evidence)}
            context.progress(f"{side}: completes requests after {found.seconds:.0f} s")
            facts[side] = {"seconds": round(found.seconds, 1)}
        candidate = _server(context, "candidate")
        reason = inactive(
            host,
            candidate,
            _client(run, context, "candidate"),
            run.kernel.package,
            _backend(run, "candidate"),
            context.facts[RELEASES]["candidate"]["digest"],
        )
        if reason:
            return {**facts, **_failed(reason, evidence(host.log_lines(candidate)))}
        return facts

    def holds(context: StepContext, facts: Facts) -> bool:
        return all(side in facts and _client(run, context, side).health() for side in SIDES)

    return Step(READY, "own completions from both, and the candidate's kernel active in every rank", wait, holds=holds)


def compare_outputs(run: PhaseRun) -> Step:
    """What the candidate emits, judged by the incumbent."""
    settings = run.settings.output

    def measure(context: StepContext) -> dict[str, Any]:
        prompts = _prompts(run)
        incumbent, candidate = _client(run, context, "incumbent"), _client(run, context, "candidate")
        theirs = outputs.collect(incumbent, prompts, settings.tokens, settings.concurrency, context.progress)
        again = outputs.repeat(incumbent, prompts, settings.tokens)
        try:
            ours = outputs.collect(candidate, prompts, settings.tokens, settings.concurrency, context.progress)
        except ServingError as fault:
            _require_alive(run, context, fault)
            return {
                "facts": _failed(f"the candidate failed during output comparison: {fault.message}", _tail(run, context))
            }
        context.progress("scoring the answers with the incumbent")
        scored, own = _scored(run.work / "serving" / ANSWERS, incumbent, ours, theirs)
        measurements, evidence = outputs.compare(scored, own, again, settings.tie)
        for row in measurements[:3]:
            context.progress(f"{row.metric}: {'no value' if row.estimate is None else f'{row.estimate:.6g}'}")
        return {"measurements": measurements, "facts": {"outputs": evidence}}

    return _measuring(
        run,
        OUTPUTS,
        f"teacher-forced log-probabilities, tokens and accept length at concurrency {settings.concurrency}",
        measure,
    )


def compare_latency(run: PhaseRun) -> Step:
    """Who is faster, pair by pair."""
    settings = run.settings.latency

    def measure(context: StepContext) -> dict[str, Any]:
        incumbent, candidate = _client(run, context, "incumbent"), _client(run, context, "candidate")
        try:
            measurements, evidence = latency.measure(
                incumbent,
                candidate,
                run.kernel.package,
                settings.pairs,
                settings.tokens,
                settings.prompt_tokens,
                context.progress,
            )
        except ServingError as fault:
            _require_alive(run, context, fault)
            return {
                "facts": _failed(
                    f"the candidate failed during latency comparison: {fault.message}", _tail(run, context)
                )
            }
        for row in measurements:
            context.progress(
                f"{row.metric}: {'no value' if row.estimate is None else f'{row.estimate:.3f} [{row.low:.3f}, {row.high:.3f}]'}"
            )
        return {"measurements": measurements, "facts": {"latency": evidence}}

    return _measuring(run, LATENCY, f"{settings.pairs} interleaved pairs: verify step and end to end", measure)


def scan_logs(run: PhaseRun) -> Step:
    """Errors only the candidate logs, and what its plugin counted."""

    def measure(context: StepContext) -> dict[str, Any]:
        host = serving_host(run)
        found = log_scan.new_errors(
            host.log_lines(_server(context, "candidate")), host.log_lines(_server(context, "incumbent"))
        )
        row = Measurement(
            "log_errors",
            float(len(found)),
            n=1,
            unit="lines",
            source="the candidate's log, less what the incumbent logs too",
            detail={"lines": found[:20]},
        )
        activity = asdict(summarize(read_activity(_client(run, context, "candidate"), run.kernel.package)))
        context.progress(
            f"{len(found)} error lines; {activity['kernel_calls']} kernel calls in {activity['verify_forwards']} verify forwards"
        )
        metrics = {side: read_metrics(_client(run, context, side), SERIES) for side in SIDES}
        return {"measurements": (row,), "facts": {"activity": activity, "metrics": metrics}}

    return _measuring(run, LOGS, "error lines of the candidate's log that the incumbent's does not have", measure)


def stop_servers(run: PhaseRun) -> Step:
    """No server is left running, whatever happened before."""

    def stop(context: StepContext) -> Facts:
        host = serving_host(run)
        running = host.left_running()
        with ThreadPoolExecutor(len(running) or 1) as pool:  # each takes seconds to drain
            list(pool.map(host.stop, running))
        return {"stopped": [server.name for server in running]}

    return Step(STOP, "both servers and every process of theirs", stop, always=True)


def write_report(run: PhaseRun) -> Step:
    """results.json, a table, and the ends of both logs into the coming checkpoint."""

    def write(context: StepContext) -> Facts:
        results, failed = _gathered(run, context), failure(context)
        shutil.rmtree(run.checkpoint_files, ignore_errors=True)
        run.checkpoint_files.mkdir(parents=True)
        write_json(run.checkpoint_files / RESULTS, results.to_json())
        run.add_file("serving.txt", report.table(results).encode())
        for side in SIDES:
            if side in context.facts.get(SERVERS, {}):
                lines = serving_host(run).log_lines(_server(context, side))[-LOG_TAIL:]
                run.add_file(f"logs/{side}.txt", ("\n".join(lines) + "\n").encode())
        if failed:
            evidence = "\n".join(failed["evidence"])
            run.add_file("failures.txt", f"candidate: {failed['reason']}\n\n{evidence}\n".encode())
            context.progress(f"candidate failed: {failed['reason']}")
        return {
            "files": sorted(
                path.relative_to(run.checkpoint_files).as_posix()
                for path in run.checkpoint_files.rglob("*")
                if path.is_file()
            )
        }

    def holds(context: StepContext, facts: Facts) -> bool:
        return all((run.checkpoint_files / name).is_file() for name in facts["files"])

    return Step(REPORT, "results.json, the table, the ends of both logs", write, holds=holds)


def failure(context: StepContext) -> dict[str, Any] | None:
    """Why the candidate failed, by the earliest step that saw it: reason and evidence."""
    for facts in context.facts.values():
        if "candidate_failed" in facts:
            return facts["candidate_failed"]
        if "kept" in facts:
            inner = load_results(context.work / facts["kept"]).facts
            if "candidate_failed" in inner:
                return inner["candidate_failed"]
    return None


# ---- between the steps ----


def _measuring(run: PhaseRun, name: str, summary: str, measure: Callable[[StepContext], dict[str, Any]]) -> Step:
    """A results step that measures nothing once the candidate has failed."""
    return run.results_step(name, summary, lambda context: {} if failure(context) else measure(context))


def _scored(
    path: Path, teacher: Client, ours: outputs.Collected, theirs: outputs.Collected
) -> tuple[list[outputs.Answer], list[outputs.Answer]]:
    """Both servers' answers with their scores. What was answered, and what a scoring that failed said, is kept in a file of the run."""
    kept: dict[str, Any] = {"candidate": outputs.as_json(ours), "incumbent": outputs.as_json(theirs)}
    write_json(path, kept)
    try:
        return outputs.score(teacher, ours), outputs.score(teacher, theirs)
    except ScoringError as fault:
        write_json(
            path,
            {
                **kept,
                "scoring": {
                    "reason": fault.message,
                    "given": list(fault.given),
                    "rows": [[str(value) for value in row] for row in fault.rows],
                },
            },
        )
        raise ServingError(fault.message, hint=f"{fault.hint} Ids and rows are in {path}.") from fault


def _failed(reason: str, evidence: tuple[str, ...] = ()) -> Facts:
    return {"candidate_failed": {"reason": reason, "evidence": list(evidence)}}


def _gathered(run: PhaseRun, context: StepContext) -> Results:
    """All results, with how both servers came up as measurements and facts."""
    results, failed = run.gathered(context), failure(context)
    ready = Measurement(
        "candidate_ready",
        0.0 if failed else 1.0,
        n=1,
        unit="candidate up, active and completing",
        source=failed["reason"] if failed else "own completions, fact files, /server_info",
    )
    facts = dict(results.facts)
    for name in (ENVIRONMENT, RELEASES, OBJECTS, READY):
        facts[name] = {
            key: value
            for key, value in context.facts.get(name, {}).items()
            if key not in ("manifest", "candidate_failed", "unused_models")
        }
    if failed:
        facts["candidate_failed"] = failed
    return Results(results.phase, results.kernel, measurements=(ready, *results.measurements), facts=facts)


def _require_alive(run: PhaseRun, context: StepContext, fault: ServingError) -> None:
    """Let a fault stand as the run's error when it is the incumbent that is gone."""
    if not _client(run, context, "incumbent").health():
        raise ServingError(
            f"the incumbent does not answer any more: {fault.message}", hint="The candidate was not judged."
        ) from fault


def _unfit(
    run: PhaseRun, host: ServingHost, release: dict[str, Any], found: dict[str, Any], loaded: list[str]
) -> Problem | None:
    if run.settings.server.device == "cuda" or release["archs"] != ["python"]:
        wrong = wrong_architecture(release["archs"], found["versions"]["capability"], found["versions"]["machine"])
        if wrong:
            return Problem(wrong)
    missing = missing_libraries(host, Path(release["path"]), loaded)
    return Problem(f"shared libraries are missing on the target: {', '.join(missing)}") if missing else None


def _kernel(run: PhaseRun, side: str) -> Kernel:
    path = getattr(run.settings, side).kernel
    return contract.load(run.playbook.path.parent / path) if path else run.kernel


def _packages(run: PhaseRun, side: str) -> list[Path]:
    """Directories of the further distributions in a side's release."""
    return [run.playbook.path.parent / path for path in getattr(run.settings, side).packages]


def _ports(run: PhaseRun, host: ServingHost) -> dict[str, int]:
    """The port of each side: the playbook's, or a free one that the other side does not have."""
    chosen = {side: port for side in SIDES if (port := getattr(run.settings, side).port)}
    for side in SIDES:
        while side not in chosen:
            port = host.free_port()
            if port not in chosen.values():
                chosen[side] = port
    return {side: chosen[side] for side in SIDES}


def _prompts(run: PhaseRun) -> tuple[Prompt, ...]:
    path = run.settings.output.prompts
    return load_prompts(path and run.playbook.path.parent / path)


def _released(run: PhaseRun) -> list[str]:
    """The sides that get a release: the incumbent may be a backend of SGLang's own."""
    return [side for side in SIDES if getattr(run.settings, side).release]


def _backend(run: PhaseRun, side: str) -> str:
    return getattr(run.settings, side).backend or run.kernel.backend


def _architectures(run: PhaseRun, kernel: Kernel) -> list[str]:
    on_gpu = run.settings.server.device == "cuda"
    return list(run.settings.architectures) or [
        arch for arch in kernel.architectures if arch.startswith("sm_") == on_gpu
    ]


def _server(context: StepContext, side: str) -> Server:
    return Server(**context.facts[SERVERS][side])


def _client(run: PhaseRun, context: StepContext, side: str) -> Client:
    return Client(_server(context, side).url, f"the {side}", run.settings.server.request_timeout)


def _tail(run: PhaseRun, context: StepContext) -> tuple[str, ...]:
    return evidence(serving_host(run).log_lines(_server(context, "candidate")))
