package dns

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"

	"github.com/isthmus-mesh/isthmus/plugin"
)

const (
	// udpSize is the size of answers over UDP that is asked for by EDNS0, which
	// fits into one packet in practice.
	udpSize = 1232
	// datagrams is how often a question is sent to a server over UDP.
	datagrams = 2
	// idleTime is how long an unused connection is kept.
	idleTime = 8 * time.Second
	// resolvConf names the servers if the configuration names none.
	resolvConf = "/etc/resolv.conf"
)

// client asks servers. It is safe for concurrent use.
type client struct {
	config Config
	system string // path of resolv.conf

	mu      sync.Mutex // guards the fields below
	servers *plugin.Servers
	listed  []string              // the servers
	idle    map[server][]idleConn // connections that are not in use, the newest last
	closed  bool
}

type idleConn struct {
	net.Conn

	since time.Time
}

func newClient(c Config) *client {
	return &client{config: c, system: resolvConf, idle: map[server][]idleConn{}}
}

// readServers uses the servers of the configuration or else of resolv.conf,
// which may have changed. After an error there are servers too.
func (c *client) readServers() error {
	var list []string
	local := []string{server{networkUDP, "127.0.0.1", "53"}.String()} // as resolv.conf(5) says
	if len(c.config.Servers) > 0 {
		for _, text := range c.config.Servers {
			s, err := parseServer(text)
			if err != nil {
				return err
			}
			list = append(list, s.String())
		}
	} else {
		system, err := dns.ClientConfigFromFile(c.system)
		switch {
		case errors.Is(err, os.ErrNotExist):
			system = &dns.ClientConfig{Port: "53"}
		case err != nil:
			if c.inUse() == nil {
				c.use(local)
			}
			return fmt.Errorf("read the servers of the system: %w; set servers", err)
		}
		for _, host := range system.Servers {
			list = append(list, server{networkUDP, host, system.Port}.String())
		}
		if len(list) == 0 {
			list = local
		}
	}
	c.use(list)
	return nil
}

func (c *client) use(list []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.servers == nil || !slices.Equal(list, c.listed) {
		c.servers, c.listed = plugin.NewServers(list), list
	}
}

func (c *client) inUse() *plugin.Servers {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.servers
}

// ask gets the answer to a question, through aliases. An *unusable error says
// that servers answer, and what is wrong with that.
func (c *client) ask(ctx context.Context, q question) (answer, error) {
	asked := q
	a, err := c.askServers(ctx, asked)
	for range maxAliases {
		if err != nil || a.next == "" {
			return a, err
		}
		ttl := a.ttl
		asked.name = a.next
		a, err = c.askServers(ctx, asked)
		a.ttl = min(a.ttl, ttl)
	}
	return answer{}, unusablef("more than %d aliases (CNAME), or a circle of them", maxAliases)
}

// askServers asks the servers in turn. A server whose answer is of no use is
// not taken for one that fails, as there may be good ones to other questions.
func (c *client) askServers(ctx context.Context, q question) (a answer, err error) {
	servers := c.inUse()
	first := ""
	var reasons []string
	try := func(ctx context.Context, address string) error {
		a, err = c.exchange(ctx, address, q)
		if _, ok := errors.AsType[*unusable](err); ok {
			first = address
			reasons = append(reasons, address+" "+err.Error())
			return nil
		}
		return err
	}
	err = servers.Do(ctx, try)
	if err != nil || first == "" {
		return a, err
	}
	for _, h := range servers.Health() {
		if h.Address == first || h.Err != nil {
			continue
		}
		a, err = c.exchange(ctx, h.Address, q)
		if err == nil {
			return a, nil
		}
		if ctx.Err() != nil {
			return answer{}, context.Cause(ctx)
		}
		reasons = append(reasons, h.Address+" "+err.Error())
	}
	slices.Sort(reasons) // whichever was first
	return answer{}, unusablef("%s", strings.Join(reasons, ", "))
}

// exchange asks one server.
func (c *client) exchange(ctx context.Context, address string, q question) (answer, error) {
	s, err := parseServer(address)
	if err != nil {
		return answer{}, err
	}
	a, err := c.exchangeWith(ctx, s, q, true)
	if u, ok := errors.AsType[*unusable](err); ok && (u.rcode == dns.RcodeFormatError || u.rcode == dns.RcodeNotImplemented || u.rcode == dns.RcodeBadVers) {
		a, err = c.exchangeWith(ctx, s, q, false) // an old server that does not know EDNS0
	}
	return a, err
}

func (c *client) exchangeWith(ctx context.Context, s server, q question, edns bool) (answer, error) {
	m := new(dns.Msg).SetQuestion(q.name, q.record)
	if edns {
		m.SetEdns0(udpSize, false)
	}
	packet, err := m.Pack()
	if err != nil {
		return answer{}, unusablef("cannot be asked: %v", err)
	}
	if s.network != networkUDP {
		return c.stream(ctx, s, q, m.Id, packet)
	}
	a, err := c.datagram(ctx, s, q, m.Id, packet)
	for range datagrams - 1 {
		if !isTimeout(err) || ctx.Err() != nil {
			break
		}
		a, err = c.datagram(ctx, s, q, m.Id, packet)
	}
	if errors.Is(err, errTruncated) {
		s.network = networkTCP
		if a, err = c.stream(ctx, s, q, m.Id, packet); err != nil && ctx.Err() == nil {
			err = unusablef("answers truncated, and over TCP: %v", err)
		}
	}
	return a, c.plain(err)
}

// datagram asks once over UDP, from a port of its own.
func (c *client) datagram(ctx context.Context, s server, q question, id uint16, packet []byte) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(c.config.Timeout))
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "udp", s.address())
	if err != nil {
		return answer{}, err
	}
	defer conn.Close()
	defer until(ctx, conn)()
	if _, err := conn.Write(packet); err != nil {
		return answer{}, err
	}
	buffer := make([]byte, 8<<10)
	for {
		n, err := conn.Read(buffer)
		if err != nil {
			return answer{}, err
		}
		a, err := read(q, id, buffer[:n])
		if !errors.Is(err, errForeign) { // such a message is not the server's, or late
			return a, err
		}
	}
}

// stream asks over TCP or TLS, on a connection that may have been used before.
func (c *client) stream(ctx context.Context, s server, q question, id uint16, packet []byte) (answer, error) {
	for {
		conn, used, err := c.connect(ctx, s)
		if err != nil {
			return answer{}, c.plain(err)
		}
		a, err := c.converse(ctx, conn, q, id, packet)
		if _, ok := errors.AsType[*unusable](err); err == nil || ok {
			c.put(s, conn)
			return a, err
		}
		conn.Close()
		if used && !isTimeout(err) && ctx.Err() == nil {
			continue // servers close connections that are not in use
		}
		if errors.Is(err, errForeign) || errors.Is(err, errTruncated) {
			err = unusablef("answers what was not asked: %v", err)
		}
		return answer{}, c.plain(err)
	}
}

// converse asks once on a connection.
func (c *client) converse(ctx context.Context, conn net.Conn, q question, id uint16, packet []byte) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(c.config.Timeout))
	defer cancel()
	defer until(ctx, conn)()
	framed := append(binary.BigEndian.AppendUint16(nil, uint16(len(packet))), packet...)
	if _, err := conn.Write(framed); err != nil {
		return answer{}, err
	}
	var size [2]byte
	if _, err := io.ReadFull(conn, size[:]); err != nil {
		return answer{}, err
	}
	message := make([]byte, binary.BigEndian.Uint16(size[:]))
	if _, err := io.ReadFull(conn, message); err != nil {
		return answer{}, err
	}
	return read(q, id, message)
}

// connect returns a connection to a server, which may have been used.
func (c *client) connect(ctx context.Context, s server) (conn net.Conn, used bool, err error) {
	c.mu.Lock()
	if list := c.idle[s]; len(list) > 0 {
		last := list[len(list)-1]
		c.idle[s] = list[:len(list)-1]
		c.mu.Unlock()
		return last.Conn, true, nil
	}
	c.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, time.Duration(c.config.Timeout))
	defer cancel()
	if s.network != networkTLS {
		conn, err = new(net.Dialer).DialContext(ctx, "tcp", s.address())
		return conn, false, err
	}
	// The files are read for each connection.
	config, err := c.config.TLS.Config("tls")
	if err != nil {
		return nil, false, err
	}
	config.ServerName = cmp.Or(config.ServerName, s.host)
	conn, err = (&tls.Dialer{Config: config}).DialContext(ctx, "tcp", s.address())
	return conn, false, err
}

// put keeps a connection for the next question.
func (c *client) put(s server, conn net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || conn.SetDeadline(time.Time{}) != nil {
		conn.Close()
		return
	}
	c.idle[s] = append(c.idle[s], idleConn{conn, time.Now()})
}

// reap closes connections that have not been used for a while.
func (c *client) reap() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for s, list := range c.idle {
		c.idle[s] = slices.DeleteFunc(list, func(i idleConn) bool {
			if time.Since(i.since) < idleTime {
				return false
			}
			i.Close()
			return true
		})
	}
}

// close closes all connections, also those that are put later.
func (c *client) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for _, list := range c.idle {
		for _, i := range list {
			i.Close()
		}
	}
	clear(c.idle)
}

// until lets what is done with a connection fail at the end of ctx. The caller
// calls stop when it is done.
func until(ctx context.Context, conn net.Conn) (stop func()) {
	done := make(chan struct{})
	over := context.AfterFunc(ctx, func() {
		defer close(done)
		_ = conn.SetDeadline(time.Unix(1, 0))
	})
	return func() {
		if !over() {
			<-done // the connection may be used again
		}
	}
}

func isTimeout(err error) bool {
	var timeout interface{ Timeout() bool }
	return errors.As(err, &timeout) && timeout.Timeout()
}

// plain returns an error whose text is the same for each attempt: without the
// local port and the time, and the time-out in words.
func (c *client) plain(err error) error {
	if isTimeout(err) {
		return fmt.Errorf("no answer within %v", c.config.Timeout)
	}
	if invalid, ok := errors.AsType[x509.CertificateInvalidError](err); ok && invalid.Reason == x509.Expired {
		return errors.New("the server's certificate has expired, or is not valid yet") // without the time of day
	}
	if op, ok := errors.AsType[*net.OpError](err); ok {
		return fmt.Errorf("%s: %w", op.Op, op.Err)
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errors.New("the server closed the connection")
	}
	return err
}
