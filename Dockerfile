# A container for SageMaker: `train` runs a training job, `serve` an endpoint.
#   docker build -t vramfit .
# torch's wheels bring CUDA 13 with them: the host needs a driver for it (580 or newer) and nothing else.
FROM python:3.12-slim

# Triton, which the 8-bit optimizer and compiled layers run on, builds its launcher with a C compiler
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/vramfit
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir -c constraints.txt ".[sagemaker]"

ENV PYTHONUNBUFFERED=1 \
    HF_HUB_DISABLE_TELEMETRY=1
LABEL com.amazonaws.sagemaker.capabilities.accept-bind-to-port=true
EXPOSE 8080
WORKDIR /opt/ml
# exec form: SIGTERM must reach Python, which writes a checkpoint
ENTRYPOINT ["python", "-m", "vramfit.integrations.sagemaker"]
