"""Where everything stands: the ledger, the runs on this machine, the fleet; for people and for Prometheus."""
