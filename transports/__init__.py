"""How weights travel from a trainer to the replicas."""

if __name__ == "transports":
    raise ImportError("import pitstop.transports, not transports: the repository root is on sys.path")

from pitstop.transports.adapters import merged, merged_tensors
from pitstop.transports.publish_handle import PublishHandle
from pitstop.transports.publisher import Publisher
from pitstop.transports.room import Buffers

__all__ = ["Buffers", "PublishHandle", "Publisher", "merged", "merged_tensors"]
