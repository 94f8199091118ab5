"""The fleet: hosts over ssh, releases on them, their services, and a lease that reverts by itself.

    fleet = Fleet(settings.workers(), limit=settings.at_once)             # fleet.py, settings.py
    fleet.each(lambda session: push(session, HostLock(session, "run"), bundle)).check()   # fanout.py, deploy.py, bundle.py

Layers, each knowing only those before it: `host` and `errors` (values) · `known_hosts`, `sshconfig`, `trust`,
`authentication`, `causes`, `route` (a login as ssh would have it) · `stream`, `local`, `ssh`, `transport` (argv over a
connection) · `session` and `kit` (batches of operations answered by `onhost/agent.py`) · `locks`, `releases`, `lease`, `services` (what
there is on a host) · `deploy` (one host from release to release) · `fanout` and `fleet` (many) · `router` · `doctor`.
The files in `onhost/` run on the hosts: standard library only, Python 3.8 or newer.
"""
