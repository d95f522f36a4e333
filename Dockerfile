# The service on CPU and RocksDB, over HTTP and gRPC. Build: docker build -t tierstore .
# The tag moves on with Python's fixes. Where two builds have to be the same, add the digest that
# `docker buildx imagetools inspect python:3.12-slim` shows: python:3.12-slim@sha256:…
# Another base, with Python 3.11 or newer as `python` and with pip: --build-arg BASE=…
ARG BASE=python:3.12-slim
FROM ${BASE}

RUN useradd --no-create-home --home-dir /nonexistent --uid 10001 tierstore \
    && install -d -o tierstore -g tierstore /data /snapshots

WORKDIR /opt/tierstore
COPY requirements.lock ./
# Every file is checked against its hash; what tierstore is built with is one of them, so that its own build fetches nothing.
RUN pip install --no-cache-dir --require-hashes -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY tierstore ./tierstore
# Kernels are compiled for the processor of this build. On another kind the first start compiles them into /data/kernels.
RUN pip install --no-cache-dir --no-deps --no-build-isolation . && tierstore compile

# Nothing but /data is written: the root file system may be read-only.
USER 10001
WORKDIR /data

# Inside a container loopback is the container's own, so a port can only be published from an address
# that is not loopback: the service has to be told that this is meant. There are no tokens, so whoever
# reaches the published port may change models. Publish it on 127.0.0.1, as docker-compose.yml does.
ENV TIERSTORE_DATA=/data \
    TIERSTORE_SOURCE_ROOT=/snapshots \
    TIERSTORE_HOST=0.0.0.0 \
    TIERSTORE_PORT=8000 \
    TIERSTORE_ALLOW_OPEN_NETWORK=true \
    PYTHONUNBUFFERED=1

VOLUME /data
EXPOSE 8000 8001

# Ready is also the answer of a service that holds no model yet. The start period is for kernels that have to be compiled: some ten seconds on two cores.
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=2)"]

STOPSIGNAL SIGTERM
ENTRYPOINT ["tierstore"]
CMD ["serve"]
