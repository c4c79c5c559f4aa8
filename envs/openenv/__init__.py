"""Environments behind a URL that speak OpenEnv's protocol. Each web socket is a session with one environment."""
