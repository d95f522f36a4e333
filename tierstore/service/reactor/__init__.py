"""The reactor's Python side: its threads and memory, the plans that it answers by, and what it hands on."""
