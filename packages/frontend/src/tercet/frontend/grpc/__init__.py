"""SGLang's gRPC service, for gateways that tokenize by themselves. Needs the extra `grpc`."""
