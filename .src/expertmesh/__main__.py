"""`python -m expertmesh` is the console script."""

from expertmesh.deploy.cli import main

if __name__ == "__main__":
    main()
