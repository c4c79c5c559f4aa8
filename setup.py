"""Names the packages: everything below `lightning_agentrl`, the folder `envs/` under the name `agentrl_envs`, and the
folder `configs/`, whose files are found by name.

All the rest of the packaging is in `pyproject.toml`.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["lightning_agentrl", "lightning_agentrl.*"]),
        "agentrl_envs",
        *(f"agentrl_envs.{name}" for name in find_packages("envs")),
        "lightning_agentrl.configs",
    ],
    package_dir={"agentrl_envs": "envs", "lightning_agentrl.configs": "configs"},
)
