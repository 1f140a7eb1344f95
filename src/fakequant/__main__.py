"""`python -m fakequant`: the same as the command `fakequant`."""

from fakequant._cli import main

if __name__ == "__main__":
    raise SystemExit(main())
