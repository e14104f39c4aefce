"""One formula per operator: FLOPs and bytes."""
