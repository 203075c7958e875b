package wire

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
)

// Dial connects to the plugin with the host's certificate, and returns once the
// connection is ready. The error names the failed step: reaching the socket,
// TLS, or HTTP/2. It is the error of ctx if that ends first.
func (e Endpoint) Dial(ctx context.Context, cert tls.Certificate) (*grpc.ClientConn, error) {
	roots := x509.NewCertPool()
	roots.AddCert(e.Certificate)
	var steps steps
	conn, err := grpc.NewClient("passthrough:plugin",
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			conn, err := (&net.Dialer{}).DialContext(ctx, e.Network, e.Address)
			if err != nil {
				steps.failed(fmt.Errorf("its socket cannot be reached: %w", err))
			}
			return conn, err
		}),
		grpc.WithTransportCredentials(watchedTLS{credentials.NewTLS(&tls.Config{
			Certificates: []tls.Certificate{cert},
			RootCAs:      roots,
			ServerName:   serverName,
			MinVersion:   tls.VersionTLS12,
		}), &steps}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessage)),
		grpc.WithIdleTimeout(0), // a plugin exits when the connection ends
	)
	if err != nil {
		return nil, err
	}
	conn.Connect()
	for {
		switch state := conn.GetState(); state {
		case connectivity.Ready:
			return conn, nil
		case connectivity.TransientFailure, connectivity.Shutdown:
			return nil, errors.Join(steps.error(), conn.Close())
		default:
			if !conn.WaitForStateChange(ctx, state) {
				return nil, errors.Join(ctx.Err(), conn.Close())
			}
		}
	}
}

// steps records why a connection failed, which gRPC obscures or drops.
type steps struct {
	mu  sync.Mutex
	err error // the first; guarded by mu
}

func (s *steps) failed(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		s.err = err
	}
}

func (s *steps) error() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		return errors.New("HTTP/2: the plugin did not begin it as a gRPC server does")
	}
	return s.err
}

// watchedTLS records TLS errors.
type watchedTLS struct {
	credentials.TransportCredentials
	steps *steps
}

// ClientHandshake implements [credentials.TransportCredentials].
func (w watchedTLS) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := w.TransportCredentials.ClientHandshake(ctx, authority, raw)
	if err != nil {
		w.steps.failed(tlsError(err))
		return conn, info, err
	}
	return watchedConn{conn, w.steps}, info, nil
}

// Clone implements [credentials.TransportCredentials].
func (w watchedTLS) Clone() credentials.TransportCredentials {
	return watchedTLS{w.TransportCredentials.Clone(), w.steps}
}

// watchedConn records the first error after the client's part of the handshake.
// With TLS 1.3 a server rejects the client's certificate only then (RFC 8446,
// section 4.4.2.4).
type watchedConn struct {
	net.Conn
	steps *steps
}

// Read implements [net.Conn].
func (c watchedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if err != nil && !errors.Is(err, net.ErrClosed) {
		c.steps.failed(tlsError(err))
	}
	return n, err
}

// alertWithin bounds the wait for an alert sent by a server before it closed.
const alertWithin = time.Second

// Write implements [net.Conn].
func (c watchedConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	if err != nil {
		// The server closed its end; its alert may still be readable.
		_ = c.SetReadDeadline(time.Now().Add(alertWithin))
		_, _ = c.Read(make([]byte, 1))
		c.steps.failed(tlsError(err))
	}
	return n, err
}

// tlsError attributes a TLS failure to one of the two ends.
func tlsError(err error) error {
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "remote error" { // the form of an alert in crypto/tls
		return fmt.Errorf("TLS: the plugin refuses the bridge, maybe its certificate: %w", err)
	}
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return fmt.Errorf("TLS: the plugin's certificate is not the one of its handshake: %w", err)
	}
	if errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) {
		return errors.New("TLS: the plugin closed the connection without a reason; maybe it refuses the bridge's certificate")
	}
	return fmt.Errorf("TLS: %w", err)
}
