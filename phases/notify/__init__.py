"""Telling people: hooks and webhooks on gates, rollbacks and regressions, in the background and never in the way."""
