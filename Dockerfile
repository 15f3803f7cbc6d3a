# CUDA image for cluster jobs, with vLLM. Runs are written below /workspace, which user 10001 must be able to write to:
#   docker build -t lit-asyncrl .
#   docker run --gpus all --ipc=host -v "$PWD/runs:/workspace/runs" lit-asyncrl fit --config vcpo
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# The linter takes TOKENIZERS_PARALLELISM for a secret.
# hadolint ignore=DL3064
ENV DEBIAN_FRONTEND=noninteractive \
    PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HUB_OFFLINE=1 \
    TOKENIZERS_PARALLELISM=false \
    VLLM_NO_USAGE_STATS=1

# A compiler and Python's headers: Triton builds kernels at run time. No versions: Ubuntu's archive drops one when the next is
# there, and an image that pins it no longer builds.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc g++ libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv \
    && useradd --create-home --uid 10001 trainer \
    && install -d -o trainer -g trainer /workspace

# Dependencies: built anew only when pyproject.toml changes, never with the source.
WORKDIR /src
COPY pyproject.toml ./
RUN python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
        print(*project["dependencies"], *project["optional-dependencies"]["vllm"], sep="\n")' > requirements.txt \
    && pip install --no-cache-dir -r requirements.txt

COPY README.md LICENSE ./
COPY configs configs
COPY lit_asyncrl lit_asyncrl
RUN pip install --no-cache-dir --no-deps .

WORKDIR /workspace
USER 10001
ENTRYPOINT ["lit-asyncrl"]
CMD ["--help"]
