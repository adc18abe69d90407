"""Writes the figures of docs/performance.md, and its picture, by `mlx-rq bench`.

    LD_PRELOAD=…/libopenblas.so.0 python bench/performance.py [MODEL] [--file batch.jsonl] [--quick]

All arguments go to the command, with --peers. On Linux the wheel's own BLAS is slow: preload
OpenBLAS, or nothing is tried for want of time.
"""

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "performance.md"
PICTURE = DOCS / "images" / "performance.png"
BEGIN, END = "<!-- written by bench/performance.py -->\n", "<!-- end -->\n"


def main() -> None:
    command = [sys.executable, "-P", "-m", "mlx_rq.worker", "bench", "--peers", "--markdown"]
    command += ["--plot", str(PICTURE), *sys.argv[1:]]
    figures = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    picture = f"![Speeds by rows, and what each way took](images/{PICTURE.name})\n"
    PAGE.write_text(f"{before}{BEGIN}\n{figures}\n{picture}\n{END}{after}")


if __name__ == "__main__":
    main()
