import sys

from scripts.emulate.program import main

if __name__ == "__main__":
    sys.exit(main())
