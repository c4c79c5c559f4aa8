"""Environments behind a URL that speak OpenEnv's protocol. One web socket is one session with one environment."""
