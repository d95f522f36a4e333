"""The disk tier: RocksDB, and sealed base files next to it. `tier.py` and `sealed.py` are its two forms."""
