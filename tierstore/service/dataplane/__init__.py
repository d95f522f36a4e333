"""The data plane, independent of transports: requests are planned, looked up and scored, one by one or in batches."""
