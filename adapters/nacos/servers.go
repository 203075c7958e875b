package nacos

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
)

const (
	defaultPort        = 8848
	defaultContextPath = "/nacos"
	// grpcOffset is the distance of a server's gRPC port from its port.
	grpcOffset = 1000
)

// server is one address of Nacos.
type server struct {
	scheme      string // of the HTTP API: http or https
	host        string
	port        int // of the HTTP API
	contextPath string
	grpcPort    int
}

// parseServer parses "host", "host:port" or "http://host:port/context".
func parseServer(address, contextPath string, offset int) (server, error) {
	full := address
	if !strings.Contains(full, "://") {
		full = "http://" + full
	}
	u, err := url.Parse(full)
	if err != nil {
		return server{}, fmt.Errorf("%q is not an address; write host:port, or http://host:port", address)
	}
	switch {
	case u.Scheme != "http" && u.Scheme != "https":
		return server{}, fmt.Errorf("scheme %q is neither http nor https", u.Scheme)
	case u.Hostname() == "":
		return server{}, fmt.Errorf("%q names no host; write host:port", address)
	case u.User != nil || u.RawQuery != "" || u.Fragment != "":
		return server{}, errors.New("user, query and fragment have no place in an address; for access use username and password")
	}
	s := server{scheme: u.Scheme, host: u.Hostname(), port: defaultPort, contextPath: contextPath}
	if p := u.Port(); p != "" {
		if s.port, err = strconv.Atoi(p); err != nil || s.port < 1 || s.port > 65535 {
			return server{}, fmt.Errorf("port %q is not within 1 to 65535", p)
		}
	}
	if path := strings.TrimSuffix(u.Path, "/"); path != "" {
		s.contextPath = path
	}
	s.contextPath = strings.TrimSuffix(s.contextPath, "/")
	if s.contextPath != "" && !strings.HasPrefix(s.contextPath, "/") {
		s.contextPath = "/" + s.contextPath
	}
	s.grpcPort = s.port + offset
	if s.grpcPort < 1 || s.grpcPort > 65535 {
		return server{}, fmt.Errorf("the gRPC port %d (port plus grpc_port_offset) is not within 1 to 65535", s.grpcPort)
	}
	return s, nil
}

// address returns host:port of the HTTP API.
func (s server) address() string { return net.JoinHostPort(s.host, strconv.Itoa(s.port)) }

// grpcAddress returns host:port of the gRPC server.
func (s server) grpcAddress() string { return net.JoinHostPort(s.host, strconv.Itoa(s.grpcPort)) }

// url returns the URL of an API path.
func (s server) url(path string) string { return s.scheme + "://" + s.address() + s.contextPath + path }

// servers rotates through the addresses: each failure advances to the next.
type servers struct {
	all  []server
	next int
	// recommended is a server's redirection; it is tried once, before the next.
	recommended *server
}

// take returns the server to try next.
func (s *servers) take() server {
	if r := s.recommended; r != nil {
		s.recommended = nil
		return *r
	}
	now := s.all[s.next%len(s.all)]
	s.next = (s.next + 1) % len(s.all)
	return now
}

// recommend sets the address to which a server redirects. The rest, such as the
// context path, is that of the configured server with the same port; without
// one the recommendation is ignored.
func (s *servers) recommend(address string) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return
	}
	n, err := strconv.Atoi(port)
	if err != nil {
		return
	}
	for _, known := range s.all {
		if known.port == n || known.grpcPort == n {
			known.host = strings.Trim(host, "[]")
			s.recommended = &known
			return
		}
	}
}
