package etcd

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/isthmus-mesh/isthmus/plugin"
)

const (
	// maxMessage bounds one message of the server, in bytes. It is far above
	// what a server takes for one value (1.5 MiB by default).
	maxMessage = 64 << 20
	// pageKeys is the number of keys of one page of a listing. A page that
	// would be larger than maxMessage is asked for again with fewer.
	pageKeys = 1000
)

// errBack reports a server whose revision is behind what it said before.
var errBack = errors.New("the server's revision went back: it has lost data, was restored from a backup, or another one has taken its place")

// session is the connection to one server: a client, and a watch.
type session struct {
	address string
	timeout time.Duration
	cancel  context.CancelCauseFunc
	ctx     context.Context
	client  *clientv3.Client
	stream  pb.Watch_WatchClient

	cluster uint64
	// revision is the last one that the server mentioned.
	revision int64
}

// listing is the keys at one revision.
type listing struct {
	cluster  uint64
	revision int64
	state    *state
}

// dial makes the client of a session. The connection is made with the first
// request.
func (a *Adapter) dial(ctx context.Context, address string) (*session, error) {
	user, password, err := a.config.credentials()
	if err != nil {
		return nil, err
	}
	var secure *tls.Config
	if usesTLS(address) {
		if secure, err = a.config.TLS.Config("tls"); err != nil {
			return nil, err
		}
	}
	s := &session{address: address, timeout: time.Duration(a.config.Timeout)}
	s.ctx, s.cancel = context.WithCancelCause(ctx)
	s.client, err = clientv3.New(clientv3.Config{
		Endpoints: []string{address}, TLS: secure, Username: user, Password: password, Context: s.ctx,
		DialTimeout: s.timeout, MaxCallRecvMsgSize: maxMessage, Logger: zap.NewNop(),
		// The second attempt is for a new token. Everything else is retried by
		// the adapter, at another server.
		MaxUnaryRetries: 2,
		DialOptions: []grpc.DialOption{
			grpc.WithNoProxy(), // of the environment
			grpc.WithDisableServiceConfig(),
			// The client waits for a connection, which hides why there is none.
			grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
				return invoker(ctx, method, req, reply, cc, append(opts, grpc.WaitForReady(false))...)
			}),
		},
	})
	if err != nil { // the login was refused, or there is no connection
		s.cancel(nil)
		return nil, explain(err)
	}
	return s, nil
}

// close ends the session.
func (s *session) close() {
	s.cancel(nil)
	_ = s.client.Close() // the error is that of the context
}

// bounded calls f, and cancels the session if that takes too long.
func (s *session) bounded(f func() error) error {
	late := time.AfterFunc(s.timeout, func() {
		s.cancel(fmt.Errorf("no answer within %v", s.timeout))
	})
	defer late.Stop()
	err := f()
	if cause := context.Cause(s.ctx); cause != nil {
		return cause
	}
	return explain(err)
}

// list reads all keys below the prefix at one revision. was is the state
// before.
func (s *session) list(prefix string, was, now *state) (*listing, error) {
	key, end := keyRange(prefix)
	l := &listing{state: now}
	limit := int64(pageKeys)
	for {
		var page *clientv3.GetResponse
		var tooLarge bool
		err := s.bounded(func() (err error) {
			options := []clientv3.OpOption{clientv3.WithRange(end), clientv3.WithLimit(limit)}
			if l.revision != 0 {
				options = append(options, clientv3.WithRev(l.revision))
			}
			page, err = s.client.Get(s.ctx, key, options...)
			tooLarge = status.Code(err) == codes.ResourceExhausted
			return err
		})
		if tooLarge && limit > 1 {
			limit /= 2
			continue
		}
		if err != nil {
			return nil, err
		}
		if l.revision == 0 {
			l.cluster, l.revision = page.Header.GetClusterId(), page.Header.GetRevision()
		}
		if key, err = s.take(page, prefix, key, was, now); err != nil {
			return nil, err
		}
		if !page.More || len(page.Kvs) == 0 {
			s.cluster, s.revision = l.cluster, l.revision
			return l, nil
		}
	}
}

// take adds a page, whose keys are to begin with from, to a state, and returns
// what the keys of the next page begin with.
func (s *session) take(page *clientv3.GetResponse, prefix, from string, was, now *state) (next string, err error) {
	touched := map[string]bool{}
	for _, kv := range page.Kvs {
		key := string(kv.GetKey())
		name, ok := strings.CutPrefix(key, prefix)
		if !ok || key < from {
			return "", fmt.Errorf("the server lists the key %s, which was not asked for", quoteKey(key))
		}
		from = key + "\x00"
		now.put(name, kv.GetValue(), was.keys[name], touched)
	}
	return from, nil
}

// keyRange returns the range of keys with a prefix.
func keyRange(prefix string) (key, end string) {
	if prefix == "" {
		return "\x00", "\x00" // every key
	}
	return prefix, clientv3.GetPrefixRangeEnd(prefix)
}

// watch opens the watch behind a listing, and waits until the server has it.
//
// It uses the client's stub rather than its Watcher, which retries in silence,
// even at a server without the data, and buffers without bound.
func (s *session) watch(prefix string) error {
	return s.bounded(func() error {
		// With a leader required, a server that is cut off from the others ends
		// the watch.
		stream, err := pb.NewWatchClient(s.client.ActiveConnection()).Watch(clientv3.WithRequireLeader(s.ctx), grpc.MaxCallRecvMsgSize(maxMessage))
		if err != nil {
			return err
		}
		// Fragments are not asked for: what they cost a server grows with the
		// square of their events (sendFragments of 3.7), and meanwhile it is
		// silent. A message larger than maxMessage ends the session, and the
		// listing of the next one has it in pages.
		key, end := keyRange(prefix)
		err = stream.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: &pb.WatchCreateRequest{
			Key: []byte(key), RangeEnd: []byte(end), StartRevision: s.revision + 1, ProgressNotify: true,
		}}})
		if err != nil {
			return err
		}
		s.stream = stream
		created, err := stream.Recv()
		if err != nil {
			return err
		}
		if !created.Created {
			return fmt.Errorf("the server's first message is none of a new watch: %.200s", created)
		}
		return s.check(created)
	})
}

// check returns the error that a message of the watch is.
func (s *session) check(m *pb.WatchResponse) error {
	switch {
	case m.CompactRevision != 0:
		return rpctypes.ErrCompacted
	case m.Canceled:
		return fmt.Errorf("the server ended the watch: %.200s", m.CancelReason)
	case m.Header.GetClusterId() != s.cluster:
		return fmt.Errorf("a server of cluster %x answers, and one of %x did before", m.Header.GetClusterId(), s.cluster)
	case m.Header.GetRevision() < s.revision && len(m.Events) == 0:
		return errBack
	}
	s.revision = max(s.revision, m.Header.GetRevision())
	return nil
}

// leastWatch is how long a watch lasts that is opened again when it breaks off.
const leastWatch = time.Second

// follow passes the events of each message of the watch to take until the
// session ends, and returns why. A watch that breaks off, as a proxy ends what
// lasts long, is opened again where it was, which shows whether that was an
// outage.
func (s *session) follow(prefix string, take func([]*clientv3.Event)) error {
	for {
		began := time.Now()
		broke, err := s.followStream(take)
		if !broke || time.Since(began) < leastWatch || s.watch(prefix) != nil {
			return err
		}
		take(nil)
	}
}

// followStream is follow for one stream. It reports whether it broke off.
// Progress is a message without events.
func (s *session) followStream(take func([]*clientv3.Event)) (broke bool, err error) {
	stream := s.stream
	messages, failed, done := make(chan *pb.WatchResponse), make(chan error, 1), make(chan struct{})
	// Owned by followStream, which waits for it; ends with the stream.
	go func() {
		defer close(done)
		for {
			m, err := stream.Recv()
			if err != nil {
				failed <- err
				return
			}
			select {
			case messages <- m:
			case <-s.ctx.Done():
				return
			}
		}
	}()
	defer func() {
		if !broke {
			s.cancel(nil)
		}
		<-done
	}()
	ask := time.NewTicker(s.timeout / 3)
	defer ask.Stop()
	silence := time.NewTimer(s.timeout)
	defer silence.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return false, context.Cause(s.ctx)
		case err := <-failed:
			return true, explain(err)
		case <-silence.C:
			return false, fmt.Errorf("%w for %v", errSilent, s.timeout)
		case <-ask.C:
			if err := stream.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_ProgressRequest{ProgressRequest: &pb.WatchProgressRequest{}}}); err != nil {
				continue // Recv says why
			}
		case m := <-messages:
			if err := s.check(m); err != nil {
				return false, explain(err)
			}
			silence.Reset(s.timeout)
			take(m.Events)
		}
	}
}

// errSilent reports a server that does not answer on an open connection.
var errSilent = errors.New("nothing was heard of the watch, progress asked for included,")

// explained is an error with its cure.
type explained struct {
	err  error
	text string
}

// Error implements error.
func (e *explained) Error() string { return e.text }

// Unwrap returns the error itself.
func (e *explained) Unwrap() error { return e.err }

// explain puts an error of etcd or gRPC into words, with the cure where there
// is one.
func explain(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := errors.AsType[*plugin.FieldError](err); ok {
		return err
	}
	var known rpctypes.EtcdError
	text := err.Error()
	if errors.As(rpctypes.Error(err), &known) {
		text = known.Error()
	} else if s, ok := status.FromError(err); ok {
		text = s.Message()
		if s.Code() == codes.DeadlineExceeded || errors.Is(err, context.DeadlineExceeded) {
			text = "no answer in time: " + text
		}
	}
	switch {
	case strings.Contains(text, "user name is empty"):
		text += ": it wants a user; set username and password_file, or a client certificate (tls.cert_file)"
	case strings.Contains(text, "invalid user ID or password"), strings.Contains(text, "authentication failed"):
		text += ": check username and password_file"
	case strings.Contains(text, "permission denied"):
		text += ": grant the user's role to read the keys of prefix (etcdctl role grant-permission ROLE --prefix=true read PREFIX)"
	}
	return &explained{err, text}
}
