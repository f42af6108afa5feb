"""`python -m bench`."""

from __future__ import annotations

from bench.main import main

if __name__ == "__main__":
    raise SystemExit(main())
