"""Plugins that every test room may use: real servers, started by the first test that asks for one."""

pytest_plugins = ["tests.support.nats", "tests.support.postgres", "tests.support.s3"]
