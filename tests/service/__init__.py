"""Tests of the service: real servers, unchanged clients."""
