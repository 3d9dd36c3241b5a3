"""Run the program with board, rollouts, rewards and heartbeats in a dict instead of a folder.

    TEST_MODE=True LOCAL_NODES=2 python .github/recipes/store.py

Replace the dict with a service that all machines can reach, such as a database, a bucket or a
server. Four operations are enough. Each operation does its work or raises OSError, and it must be
safe to repeat, because `waits` then calls it again. Checkpoints, logs, models and config.json
remain files. (Retention would also need `delete`.)
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import drive_store
import sapo

EXCHANGED = r"board/.*|nodes/[^/]+/(\.new-[^/]+\.post|heartbeat\.json|(rollouts|rewards)/.*)"
DATA = {}  # path -> bytes


class DictStore(drive_store.DriveStore):
    @drive_store.waits
    def write(self, path, data, replaces=True):
        if not re.fullmatch(EXCHANGED, path):
            return super().write(path, data, replaces)
        is_written = replaces or path not in DATA
        if is_written:
            DATA[path] = data
        return is_written

    @drive_store.waits
    def rename(self, path, new_path):
        if path not in DATA:
            return False
        DATA[new_path] = DATA.pop(path)
        return True

    @drive_store.waits
    def read(self, path, max_bytes, from_end=False):
        if not re.fullmatch(EXCHANGED, path):
            return super().read(path, max_bytes, from_end)
        return DATA.get(path)

    @drive_store.waits
    def list_names(self, path):
        if not re.fullmatch(EXCHANGED, f"{path}/"):
            return super().list_names(path)
        return sorted(name.removeprefix(f"{path}/") for name in DATA if name.startswith(f"{path}/"))


drive_store.DriveStore = DictStore
if __name__ == "__main__":
    sys.exit(sapo.main())
