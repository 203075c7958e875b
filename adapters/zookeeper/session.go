package zookeeper

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// maxInFlight bounds the requests without an answer.
const maxInFlight = 128

// errSilent reports a server that does not answer on an open connection.
var errSilent = errors.New("nothing was heard of the server, answers to pings included,")

// session is one connection with a session of its own: what it has watched ends
// with it. It is used by one goroutine, except for its reader and its writer.
type session struct {
	address string
	timeout time.Duration
	ctx     context.Context // of the session: it ends with the connection
	cancel  context.CancelCauseFunc
	conn    net.Conn
	wg      sync.WaitGroup
	started bool

	// out has room for all requests that may be in flight, and a ping: sending
	// never blocks.
	out chan []byte
	in  chan message

	xid  int32
	ping time.Duration
	zxid int64 // the last that the server mentioned
}

// dial opens a connection and a session, and authenticates.
func (a *Adapter) dial(ctx context.Context, address string) (_ *session, err error) {
	s := &session{address: address, timeout: time.Duration(a.config.Timeout), out: make(chan []byte, maxInFlight+2), in: make(chan message)}
	// The end of ctx closes the session at the server, before the connection.
	s.ctx, s.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	defer context.AfterFunc(ctx, func() { s.cancel(context.Cause(ctx)) })()
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	user, password, err := a.config.credentials()
	if err != nil {
		return nil, err
	}
	dialing, done := context.WithTimeout(ctx, s.timeout)
	defer done()
	d := &net.Dialer{}
	if a.config.TLS.Enabled {
		var secure *tls.Config
		if secure, err = a.config.TLS.Config("tls"); err != nil {
			return nil, err
		}
		s.conn, err = (&tls.Dialer{NetDialer: d, Config: secure}).DialContext(dialing, "tcp", address)
	} else {
		s.conn, err = d.DialContext(dialing, "tcp", address)
	}
	if err != nil {
		return nil, err
	}
	context.AfterFunc(s.ctx, func() { _ = s.conn.Close() })
	if err := s.conn.SetDeadline(time.Now().Add(s.timeout)); err != nil {
		return nil, err
	}
	if err := s.connect(); err != nil {
		return nil, s.explain(err)
	}
	if user != "" {
		if a.config.Auth == authSASL {
			err = s.sasl(user, password)
		} else {
			err = s.digest(user, password)
		}
		if err != nil {
			return nil, s.explain(err)
		}
	}
	if err := s.conn.SetDeadline(time.Time{}); err != nil {
		return nil, err
	}
	s.start()
	return s, nil
}

// explain returns why the session ended instead of the error that followed.
func (s *session) explain(err error) error {
	if cause := context.Cause(s.ctx); cause != nil {
		return cause
	}
	if e, ok := errors.AsType[net.Error](err); ok && e.Timeout() {
		return fmt.Errorf("no answer within %v", s.timeout)
	}
	return closed(err)
}

// closed says of the end of a connection whose it is.
func closed(err error) error {
	if errors.Is(err, io.EOF) {
		return errors.New("the server closed the connection")
	}
	return err
}

// close ends the session and waits for its goroutines.
func (s *session) close() {
	if s.started {
		s.quit()
	}
	s.cancel(nil)
	if s.conn != nil {
		_ = s.conn.Close()
	}
	s.wg.Wait()
}

// connect exchanges the first messages. The id of the last change that was seen
// is not given: a server that has lost data would refuse the session for ever.
func (s *session) connect() error {
	w := newWriter()
	w.int(0)
	w.long(0)
	w.int(int32(s.timeout.Milliseconds())) //nolint:gosec // at most ten minutes
	w.long(0)
	w.bytes(make([]byte, 16))
	w.bool(false) // a server that is cut off from the others is no good
	if _, err := s.conn.Write(w.frame()); err != nil {
		return err
	}
	b, err := readFrame(s.conn, 1<<10)
	if err != nil {
		return err
	}
	c, err := parseConnected(b)
	if err != nil {
		return err
	}
	if c.session == 0 {
		return errors.New("the server refused the session")
	}
	// A third of what the server allows, and of what is waited for here.
	s.ping = min(time.Duration(c.timeout)*time.Millisecond, s.timeout) / 3
	return nil
}

// exchange sends one message and reads the answer, before the reader starts.
func (s *session) exchange(w writer) (message, error) {
	if _, err := s.conn.Write(w.frame()); err != nil {
		return message{}, err
	}
	b, err := readFrame(s.conn, 1<<16)
	if err != nil {
		return message{}, err
	}
	m, err := parseMessage(b)
	if err == nil && m.code != 0 {
		err = m.code
	}
	return m, err
}

// digest authenticates with scheme digest, which never fails: a wrong password
// is another identity.
func (s *session) digest(user, password string) error {
	w := newWriter()
	w.int(xidAuth)
	w.int(opAuth)
	w.int(0)
	w.string("digest")
	w.bytes([]byte(user + ":" + password))
	if _, err := s.exchange(w); err != nil {
		return fmt.Errorf("authenticate: %w", err)
	}
	return nil
}

// sasl authenticates with SASL DIGEST-MD5.
func (s *session) sasl(user, password string) error {
	var token []byte
	for step := range 2 {
		w := newWriter()
		s.xid++
		w.int(s.xid)
		w.int(opSASL)
		w.bytes(token)
		m, err := s.exchange(w)
		if err != nil {
			return fmt.Errorf("authenticate with SASL: %w: check username and password_file", err)
		}
		challenge := m.body.bytes()
		if m.body.err != nil {
			return m.body.err
		}
		if step == 0 {
			if token, err = digestMD5(challenge, user, password, newNonce()); err != nil {
				return err
			}
		}
	}
	return nil
}

// start starts the reader and the writer, which end with the session.
func (s *session) start() {
	s.started = true
	s.wg.Go(func() {
		s.cancel(s.read())
	})
	s.wg.Go(func() {
		s.cancel(s.write())
	})
}

// read passes messages on, one at a time: a burst waits at the server.
func (s *session) read() error {
	in := bufio.NewReaderSize(s.conn, 64<<10)
	for {
		b, err := readFrame(in, maxFrame)
		if err != nil {
			return closed(err)
		}
		m, err := parseMessage(b)
		if err != nil {
			return err
		}
		select {
		case s.in <- m:
		case <-s.ctx.Done():
			return context.Cause(s.ctx)
		}
	}
}

// write writes what is in out, as much as there is at once.
func (s *session) write() error {
	out := bufio.NewWriterSize(s.conn, 16<<10)
	for {
		select {
		case b := <-s.out:
			if _, err := out.Write(b); err != nil {
				return err
			}
		case <-s.ctx.Done():
			return context.Cause(s.ctx)
		}
		if len(s.out) == 0 {
			if err := out.Flush(); err != nil {
				return err
			}
		}
	}
}

// request sends a request and returns the id that its answer will have. The
// caller has at most maxInFlight without an answer.
func (s *session) request(op int32, path string, rest func(*writer)) (xid int32) {
	s.xid = s.xid%(1<<30) + 1
	w := newWriter()
	w.int(s.xid)
	w.int(op)
	w.string(path)
	if rest != nil {
		rest(&w)
	}
	s.out <- w.frame()
	return s.xid
}

// sendPing asks the server for a sign of life.
func (s *session) sendPing() {
	w := newWriter()
	w.int(xidPing)
	w.int(opPing)
	select {
	case s.out <- w.frame():
	default: // so much is unsent that the server will be silent
	}
}

// due is a timer of the caller, and what it does.
type due struct {
	at <-chan time.Time
	do func()
}

// receive passes messages to take until it has enough, or the session or ctx
// ends; it returns why. The timer of what is due fires meanwhile.
func (s *session) receive(ctx context.Context, take func(message) (enough bool, err error), dues ...due) error {
	ask := time.NewTicker(s.ping)
	defer ask.Stop()
	silence := time.NewTimer(s.timeout)
	defer silence.Stop()
	var timer due
	if len(dues) > 0 {
		timer = dues[0]
	}
	for {
		var m message
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-s.ctx.Done():
			return context.Cause(s.ctx)
		case <-ask.C:
			s.sendPing()
			continue
		case <-timer.at:
			timer.do()
			continue
		case m = <-s.in:
		case <-silence.C:
			// A process that did not run for long may have both.
			select {
			case m = <-s.in:
			default:
				return fmt.Errorf("%w for %v", errSilent, s.timeout)
			}
		}
		if m.zxid > 0 {
			s.zxid = max(s.zxid, m.zxid)
		}
		if enough, err := take(m); enough || err != nil {
			return err
		}
		silence.Reset(s.timeout) // the time that take needed is not the server's
	}
}

// quit ends the session at the server, too.
func (s *session) quit() {
	w := newWriter()
	s.xid++
	w.int(s.xid)
	w.int(opClose)
	select {
	case s.out <- w.frame():
	default:
		return
	}
	// The server answers and closes the connection. Without an answer it ends
	// the session when its time is over.
	late := time.NewTimer(time.Second)
	defer late.Stop()
	for {
		select {
		case <-s.in:
		case <-s.ctx.Done():
			return
		case <-late.C:
			return
		}
	}
}

// credentials are read for every connection.
func (c Config) credentials() (user, password string, err error) {
	read := func(field, value, file string) string {
		if file == "" || err != nil {
			return value
		}
		s, failed := plugin.ReadSecret(file)
		if failed != nil {
			err = &plugin.FieldError{Field: field, Reason: failed.Error()}
		}
		return s
	}
	user = read("username_file", c.Username, c.UsernameFile)
	password = read("password_file", string(c.Password), c.PasswordFile)
	return user, password, err
}
