package mcp

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"

	"github.com/isthmus-mesh/isthmus/internal/wait"
	mcpv1 "github.com/isthmus-mesh/isthmus/server/mcp/proto/isthmus/mcp/v1"
	"github.com/isthmus-mesh/isthmus/server/stream"
	"github.com/isthmus-mesh/isthmus/server/wire"
)

// Sink is a sink that the server dials.
type Sink struct {
	// Address is a gRPC target, such as "pilot.example.org:9901" or
	// "dns:///pilot.example.org:9901".
	Address string
	// TLS secures the connection; nil means plaintext.
	TLS *TLS
	// Metadata is sent with the call as HTTP/2 headers.
	Metadata map[string]string
	// Headers, unless nil, returns more of them for each call.
	Headers func() metadata.MD
}

// TLS names PEM files. They are read for each connection, so replaced files
// take effect.
type TLS struct {
	// CA holds the certificates of authorities that the sink's certificate may
	// come from; "" selects those of the system.
	CA string
	// Certificate and Key are the client's, for a sink that requires one; set
	// both or none.
	Certificate, Key string
	// ServerName is the name in the sink's certificate; "" selects the host of
	// the address.
	ServerName string
}

// Credentials reads the files and returns the credentials.
func (t *TLS) Credentials() (credentials.TransportCredentials, error) {
	if t == nil {
		return insecure.NewCredentials(), nil
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: t.ServerName}
	if t.CA != "" {
		pem, err := os.ReadFile(t.CA)
		if err != nil {
			return nil, fmt.Errorf("ca: %w", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("ca: %s holds no certificate in PEM", t.CA)
		}
	}
	if t.Certificate != "" || t.Key != "" {
		pair, err := tls.LoadX509KeyPair(t.Certificate, t.Key)
		if err != nil {
			return nil, fmt.Errorf("certificate: %w", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return credentials.NewTLS(config), nil
}

// Timing of reverse mode.
const (
	// redialMin and redialMax bound the back-off between attempts. It doubles
	// with each failure and varies by a fifth.
	redialMin = time.Second
	redialMax = time.Minute
	// pingAfter is the idle time before a ping. The default policy of gRPC
	// servers closes connections that ping more often than every five minutes.
	pingAfter   = 6 * time.Minute
	pingTimeout = 20 * time.Second
)

// Dial serves a sink in reverse mode: it opens a stream to the sink and reopens
// it whenever it ends. It returns ctx's error when ctx ends.
func (s *Server) Dial(ctx context.Context, sink Sink, options ...grpc.DialOption) error {
	log := s.log.With(slog.String("sink", sink.Address))
	after := time.Duration(0)
	for {
		s.metrics.dials.Inc()
		worked, err := s.dialOnce(ctx, sink, options)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		after = min(max(2*after, redialMin), redialMax)
		if worked {
			after = redialMin
		}
		retry := time.Duration(float64(after) * (0.8 + 0.4*rand.Float64()))
		log.Warn("no stream to the sink", slog.Any("err", err), slog.Duration("retry_after", retry))
		wait.Pause(ctx, retry, s.Down())
		select {
		case <-s.Down():
			return stream.ErrShutdown
		case <-ctx.Done():
			return context.Cause(ctx)
		default:
		}
	}
}

// dialOnce opens a stream and serves it until it ends. worked reports whether
// the sink subscribed to anything.
func (s *Server) dialOnce(ctx context.Context, sink Sink, options []grpc.DialOption) (worked bool, err error) {
	creds, err := sink.TLS.Credentials()
	if err != nil {
		return false, fmt.Errorf("tls: %w", err)
	}
	conn, err := grpc.NewClient(sink.Address, append([]grpc.DialOption{
		grpc.WithTransportCredentials(creds),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(wire.NewCodec()), grpc.MaxCallRecvMsgSize(64<<20)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: pingAfter, Timeout: pingTimeout}),
	}, options...)...)
	if err != nil {
		return false, err
	}
	defer conn.Close()
	entry, err := s.Enter(ctx, nil)
	if err != nil {
		return false, err
	}
	defer entry.Leave()
	entry.Address, ctx = sink.Address, entry.Context()
	for key, value := range sink.Metadata {
		ctx = metadata.AppendToOutgoingContext(ctx, key, value)
	}
	if sink.Headers != nil {
		md, _ := metadata.FromOutgoingContext(ctx)
		ctx = metadata.NewOutgoingContext(ctx, metadata.Join(md, sink.Headers()))
	}
	st, err := conn.NewStream(ctx, &grpc.StreamDesc{StreamName: streamName, ServerStreams: true, ClientStreams: true}, SinkMethod)
	if err != nil {
		return false, err
	}
	if err := st.SendMsg(&stream.Message{Header: header("", TriggerCollection, "", nil, false)}); err != nil {
		return false, errors.Join(err, st.RecvMsg(new(mcpv1.RequestResources)))
	}
	worked, err = s.serve(st, true)
	return worked, cmp.Or(err, io.EOF)
}
