# The bridge in an image without anything else. Build it from the root of the repository:
#
#   docker build --build-arg VERSION=$(git describe --tags --always) -t isthmus .
FROM golang:1.26 AS build
ARG VERSION=unknown
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
RUN CGO_ENABLED=0 go build -trimpath -ldflags "-s -w -X main.version=${VERSION}" -o /isthmus ./cmd/isthmus

FROM gcr.io/distroless/static-debian12:nonroot
COPY --from=build /isthmus /isthmus
# Plugins and the bridge talk over sockets in the directory for temporary files, which has to be writable.
VOLUME /tmp
EXPOSE 15051 15080
ENTRYPOINT ["/isthmus"]
CMD ["serve", "--config", "/etc/isthmus/isthmus.yaml"]
