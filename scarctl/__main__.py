"""Run the command line as `python -m scarctl`."""

from scarctl.cli.main import main

if __name__ == "__main__":
    main()
