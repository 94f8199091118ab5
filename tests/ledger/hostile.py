"""A git configuration and an environment such as people really have them, all at once: each line of them has misled some tool that asks git."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

HOOKS = (
    "reference-transaction",
    "pre-push",
    "pre-commit",
    "commit-msg",
    "post-index-change",
    "pre-auto-gc",
    "post-checkout",
)

CONFIG = """
[user]
    signingKey = {folder}/key
    useConfigOnly = true
[gpg]
    format = ssh
[commit]
    gpgSign = true
    template = /nonexistent
    verbose = true
[tag]
    gpgSign = true
    forceSignAnnotated = true
    sort = -version:refname
[log]
    showSignature = true
    date = relative
    follow = true
    decorate = full
    mailmap = true
[core]
    hooksPath = {folder}/hooks
    fsmonitor = {folder}/nothing-changed
    untrackedCache = true
    splitIndex = true
    autocrlf = true
    safecrlf = true
    eol = crlf
    fileMode = false
    trustctime = false
    checkStat = minimal
    ignoreStat = true
    ignoreCase = true
    excludesFile = {folder}/excludes
    attributesFile = {folder}/attributes
    commentChar = C
    abbrev = 4
    quotePath = true
    pager = false
    editor = false
    askPass = false
    logAllRefUpdates = false
    whitespace = cr-at-eol
    compression = 0
    bigFileThreshold = 1
[filter "lie"]
    clean = printf 'x = 1\\n'
    smudge = cat
    required = true
[diff]
    external = false
    noprefix = true
    mnemonicPrefix = true
    renames = copies
    ignoreSubmodules = all
    algorithm = patience
    colorMoved = default
    submodule = diff
    orderFile = /nonexistent
    context = 0
    relative = true
[diff "lie"]
    command = false
    textconv = false
[status]
    showUntrackedFiles = no
    short = true
    branch = true
    relativePaths = true
    submoduleSummary = true
[color]
    ui = always
    advice = always
    push = always
    remote = always
    transport = always
    status = always
[column]
    ui = always
[pager]
    log = false
    tag = false
    for-each-ref = false
[alias]
    rev-parse = !false
    log = !false
    config = !false
[advice]
    pushUpdateRejected = false
    pushFetchFirst = false
    pushAlreadyExists = false
    detachedHead = false
[submodule]
    recurse = true
[fetch]
    prune = true
    pruneTags = true
    recurseSubmodules = true
    writeCommitGraph = true
    fsckObjects = true
    output = compact
    parallel = 4
[transfer]
    fsckObjects = true
[push]
    default = nothing
    followTags = true
    recurseSubmodules = only
    pushOption = merge_request.create
    useForceIfIncludes = true
    autoSetupRemote = true
[gc]
    auto = 1
    pruneExpire = now
[maintenance]
    auto = true
[i18n]
    commitEncoding = ISO-8859-1
    logOutputEncoding = UTF-16
[init]
    defaultBranch = trunk
[feature]
    manyFiles = true
    experimental = true
[index]
    version = 4
    threads = 1
[rebase]
    autoStash = true
[url "ssh://nowhere.example/"]
    insteadOf = nowhere:
[protocol "file"]
    allow = always
[remote "origin"]
    # as on another machine, which does not read this file
    uploadpack = env GIT_CONFIG_GLOBAL=/dev/null git-upload-pack
    receivepack = env GIT_CONFIG_GLOBAL=/dev/null git-receive-pack
    mirror = true
    prune = true
    pruneTags = true
    tagOpt = --tags
    push = refs/heads/*:refs/heads/evil/*
"""

# What hooks, tools and profiles leave behind; none of it is where a remote is or how it is reached.
VARIABLES = {
    "GIT_DIR": "/nonexistent",
    "GIT_COMMON_DIR": "/nonexistent",
    "GIT_WORK_TREE": "/",
    "GIT_INDEX_FILE": "/nonexistent/index",
    "GIT_OBJECT_DIRECTORY": "/nonexistent/objects",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES": "/nonexistent/more",
    "GIT_QUARANTINE_PATH": "/nonexistent/quarantine",  # forbids every reference to move
    "GIT_NAMESPACE": "elsewhere",
    "GIT_CONFIG": "/nonexistent/config",
    "GIT_SHALLOW_FILE": "/nonexistent/shallow",
    "GIT_GRAFT_FILE": "/nonexistent/grafts",
    "GIT_REPLACE_REF_BASE": "refs/evil/",
    "GIT_ATTR_SOURCE": "nothing",
    "GIT_EXTERNAL_DIFF": "false",
    "GIT_DIFF_OPTS": "--unified=0",
    "GIT_PAGER": "false",
    "GIT_PAGER_IN_USE": "1",
    "GIT_EDITOR": "false",
    "GIT_AUTHOR_DATE": "the day before",
    "GIT_COMMITTER_DATE": "the day before",
    "GIT_DEFAULT_HASH": "sha256",
    "GIT_TEMPLATE_DIR": "/nonexistent/template",
    "GIT_TRACE": "1",
    "GIT_TRACE_SETUP": "1",
    "GIT_ICASE_PATHSPECS": "1",
    "GIT_GLOB_PATHSPECS": "1",
    "GIT_OPTIONAL_LOCKS": "1",
    "GIT_REFLOG_ACTION": "evil",
    "GIT_IMPLICIT_WORK_TREE": "0",
    "GIT_FORCE_UNTRACKED_CACHE": "1",
    "GIT_TERMINAL_PROMPT": "1",
    "LC_ALL": "C.UTF-8",
    "LANGUAGE": "de:fr",
}


def configure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make git's global configuration and the environment of this test hostile; what they name lies in `folder`."""
    folder.mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")], check=True)
    hooks(folder / "hooks")
    script(folder / "nothing-changed", "printf 'token\\0'")  # as core.fsmonitor: no file has changed since
    (folder / "excludes").write_text("*\n")
    (folder / "attributes").write_text("* filter=lie diff=lie text\n")
    (folder / "gitconfig").write_text(CONFIG.format(folder=folder))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(folder / "gitconfig"))
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


def hooks(directory: Path) -> None:
    """A hook of every kind that git would call here; each says no."""
    directory.mkdir(exist_ok=True)
    for name in HOOKS:
        script(directory / name, "echo hook of the test >&2; exit 1")


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
