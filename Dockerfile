# The manager: one static binary. The tools, the tests and the control plane for development are not needed.
FROM golang:1.26 AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY main.go ./
COPY api api
COPY config config
COPY internal internal
RUN CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o /manager .

FROM scratch
COPY --from=build /manager /manager
USER 65532:65532
ENTRYPOINT ["/manager"]
