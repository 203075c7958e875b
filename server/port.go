package server

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	"github.com/isthmus-mesh/isthmus/internal/conf"
	"github.com/isthmus-mesh/isthmus/server/access"
	"github.com/isthmus-mesh/isthmus/server/admin"
	"github.com/isthmus-mesh/isthmus/server/config"
	mcpserver "github.com/isthmus-mesh/isthmus/server/mcp"
	"github.com/isthmus-mesh/isthmus/server/stream"
	"github.com/isthmus-mesh/isthmus/server/xds"
)

// Fields of the configuration that hold ports.
const (
	fieldXDS   = "listen.xds"
	fieldAdmin = "listen.admin"
	fieldMCP   = "listen.mcp"
)

// port is a configured listener and its server.
type port struct {
	config.NamedListener
	gate    *access.Gate // nil until the port is open
	streams *stream.Listener
	*listener
	end   context.CancelFunc // ends serving
	ended chan struct{}      // closed when serving has ended
}

// isGRPC reports whether the port serves streams.
func (p *port) isGRPC() bool { return p.Field != fieldAdmin }

// wanted returns the ports of a configuration, not yet open.
func wanted(l *config.Listen) []*port {
	var all []*port
	for _, x := range l.All() {
		all = append(all, &port{NamedListener: x})
	}
	return all
}

func (p *port) listen() error {
	l, err := p.open()
	if err != nil {
		return fmt.Errorf("%s: %w", p.Field, err)
	}
	p.listener = &listener{l: l, addr: l.Addr(), closed: make(chan struct{})}
	return nil
}

func (p *port) open() (net.Listener, error) {
	path, ok := p.Socket()
	if !ok {
		return net.Listen("tcp", p.Address)
	}
	if info, err := os.Lstat(path); err == nil && info.Mode()&os.ModeSocket != 0 {
		// A bridge that was killed leaves its socket; one that runs answers.
		if conn, err := net.Dial("unix", path); err == nil {
			return nil, errors.Join(fmt.Errorf("unix:%s is in use", path), conn.Close())
		}
		if err := os.Remove(path); err != nil {
			return nil, err
		}
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o660); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// policies reads the files of listeners.
func policies(cfg *config.Config, ports []*port) (all []*access.Policy, found config.Problems) {
	all = make([]*access.Policy, len(ports))
	for i, p := range ports {
		var err error
		if all[i], err = access.New(p.Listener); err != nil {
			for _, f := range conf.FieldErrors(err) {
				path := p.Path + "." + f.Field
				found = append(found, &config.Problem{File: cfg.File(), Position: cfg.Position(path), Field: path, Reason: f.Reason})
			}
		}
	}
	if len(found) > 0 {
		closePolicies(all)
		return nil, found.Sort()
	}
	return all, nil
}

func closePolicies(all []*access.Policy) {
	for _, p := range all {
		if p != nil {
			p.Close()
		}
	}
}

// CheckListeners reads the files that the listeners of a configuration need and
// returns what is wrong with them.
func CheckListeners(cfg *config.Config) config.Problems {
	all, found := policies(cfg, wanted(&cfg.Listen))
	closePolicies(all)
	return found
}

// maxHeaders bounds the headers of a request, in bytes: tokens and what a proxy
// adds. gRPC's default is 16 MB.
const maxHeaders = 64 << 10

// servePort serves until ctx has ended and the streams have drained, within the
// configured time. From the end of ctx, connections refuse new streams, and
// unless the bridge ends, which has its own order, existing ones end spread
// over that time. Ports of xDS serve the legacy protocol only if it has no
// port.
func (s *Server) servePort(ctx context.Context, p *port) error {
	defer p.gate.Close()
	if p.Field == fieldAdmin {
		a := admin.New(source{s}, admin.Options{Pace: s.crowd.queries, Gatherer: s.options.Metrics, Pprof: s.config().Admin.Pprof, Log: s.log, Operator: operator{s}, Gate: p.gate, GuardProbes: s.config().Admin.GuardProbes})
		return a.Run(ctx, p.gate.Listener(queryListener{crowdListener{p.listener, s.crowd}}))
	}
	elsewhere := func() bool { return p.Field == fieldXDS && s.config().Listen.MCP.Address != "" }
	server := grpc.NewServer(append(xds.ServerOptions(),
		grpc.InTapHandle(s.crowd.tap), grpc.MaxHeaderListSize(maxHeaders),
		grpc.Creds(s.crowd.intake.credentials(p.gate.Credentials())), grpc.ConnectionTimeout(access.HandshakeTime),
		grpc.ChainStreamInterceptor(p.streams.Stream, s.crowd.counted, p.gate.Stream, s.crowd.stream, mcpserver.RefuseIf(elsewhere), s.tellWaiting))...)
	s.mcp.Register(server)
	if p.Field == fieldXDS {
		s.xds.Register(server)
	}
	stopped := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(stopped)
		over := time.Duration(s.config().Drain)
		if !s.drained.Load() {
			p.streams.Drain(over)
		}
		timer := time.AfterFunc(over+drainWithin, server.Stop)
		defer timer.Stop()
		server.GracefulStop()
	})
	defer stop()
	if err := server.Serve(crowdListener{p.listener, s.crowd}); err != nil && ctx.Err() == nil {
		server.Stop()
		return fmt.Errorf("%s %v: %w", strings.TrimPrefix(p.Field, "listen."), p.Addr(), err)
	}
	<-stopped
	return nil
}

// guard puts the gate before an open port.
func (s *Server) guard(p *port, rules *access.Policy) {
	p.streams = s.streams.Listener(p.String())
	p.gate = access.NewGate(p.streams, rules, s.access, s.audit, s.log)
}

// start serves an open port in group.
func (s *Server) start(ctx context.Context, group *errgroup.Group, p *port) {
	ctx, p.end = context.WithCancel(ctx)
	p.ended = make(chan struct{})
	group.Go(func() error {
		p.gate.Watch(ctx)
		return nil
	})
	group.Go(func() error {
		defer close(p.ended)
		defer p.end()
		return s.servePort(ctx, p)
	})
}

// openPorts opens ports. A port in going that has the same address is paused;
// [listener.resume] restores it. After an error nothing is open and nothing is
// paused.
func openPorts(ports, going []*port) (failed error) {
	var opened, paused []*port
	for _, p := range ports {
		err := p.listen()
		if errors.Is(err, syscall.EADDRINUSE) {
			for _, g := range going {
				if samePort(g.Addr().String(), p.Address) && g.pause() {
					paused = append(paused, g)
				}
			}
			err = p.listen()
		}
		if err != nil {
			failed = err
			break
		}
		opened = append(opened, p)
	}
	if failed == nil {
		return nil
	}
	for _, p := range opened {
		failed = errors.Join(failed, p.Close())
	}
	for _, p := range paused {
		if err := p.resume(); err != nil {
			failed = errors.Join(failed, fmt.Errorf("%s: take %s back: %w", p.Field, p.Address, err))
		}
	}
	return failed
}

func samePort(a, b string) bool {
	_, x, err := net.SplitHostPort(a)
	_, y, other := net.SplitHostPort(b)
	return err == nil && other == nil && x == y
}

// listener is a listener that can release its address temporarily.
type listener struct {
	addr   net.Addr
	closed chan struct{} // by Close

	mu      sync.Mutex
	l       net.Listener  // guarded by mu
	resumed chan struct{} // guarded by mu; nil unless paused
	once    sync.Once
}

// Addr implements [net.Listener].
func (l *listener) Addr() net.Addr { return l.addr }

// Accept implements [net.Listener].
func (l *listener) Accept() (net.Conn, error) {
	for {
		l.mu.Lock()
		now, resumed := l.l, l.resumed
		l.mu.Unlock()
		if resumed == nil {
			conn, err := now.Accept()
			l.mu.Lock()
			paused := l.l != now || l.resumed != nil
			l.mu.Unlock()
			if err == nil || !paused {
				return conn, err
			}
			continue
		}
		select {
		case <-resumed:
		case <-l.closed:
			return nil, net.ErrClosed
		}
	}
}

// Close implements [net.Listener].
func (l *listener) Close() error {
	l.once.Do(func() { close(l.closed) })
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.resumed != nil {
		return nil
	}
	return l.l.Close()
}

// pause releases the address. It reports whether the listener was active.
func (l *listener) pause() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.resumed != nil {
		return false
	}
	l.resumed = make(chan struct{})
	_ = l.l.Close() // an error means that it is closed already
	return true
}

// resume listens on the address again.
func (l *listener) resume() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	again, err := net.Listen("tcp", l.addr.String())
	if err != nil {
		return err
	}
	close(l.resumed)
	l.l, l.resumed = again, nil
	return nil
}
