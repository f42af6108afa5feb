"""`python -m tests.cli.scripted_tandem ...`: the `tandem` command with scripted services behind `up` and `demo`."""

from __future__ import annotations

from cli.child import SERVICE_MODULES
from cli.main import main

if __name__ == "__main__":
    SERVICE_MODULES.update(dict.fromkeys(SERVICE_MODULES, "tests.cli.scripted_service"))
    main()
