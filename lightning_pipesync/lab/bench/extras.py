"""The packages that are installed with an extra only."""

from __future__ import annotations

from importlib.util import find_spec

#: What has to be installed by what is imported. All of it comes with the extra ``bench``.
EXTRAS = {
    "matplotlib": "matplotlib",
    "pyroute2": "pyroute2",
    "rich": "rich",
    "sklearn": "scikit-learn",
    "transformers": "transformers",
}


def check_installed(*names: str) -> None:
    """Checks that packages can be imported, before anything is measured.

    Raises:
        ModuleNotFoundError: one is missing; the message says what installs it.
    """
    missing = [EXTRAS[name] for name in names if find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing: "
            "pip install 'lightning-pipesync[bench]'."
        )
