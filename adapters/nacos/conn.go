package nacos

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	grpcapi "github.com/nacos-group/nacos-sdk-go/v2/api/grpc"
	"github.com/nacos-group/nacos-sdk-go/v2/common/constant"
	"github.com/nacos-group/nacos-sdk-go/v2/common/remote/rpc/rpc_request"
	"github.com/nacos-group/nacos-sdk-go/v2/common/remote/rpc/rpc_response"
	"github.com/nacos-group/nacos-sdk-go/v2/model"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/isthmus-mesh/isthmus/plugin"
)

const (
	// maxMessage bounds one message of the server, in bytes: a service of
	// 100,000 instances fits.
	maxMessage = 64 << 20
	// requestTimeout bounds one request.
	requestTimeout = 10 * time.Second
	// checkTimeout bounds the first request, including the dial.
	checkTimeout = 5 * time.Second
	// connectTimeout bounds the time until a connection is registered.
	connectTimeout = 15 * time.Second
	// healthEvery is the interval of health checks: a server closes a
	// connection without requests after about 20 s.
	healthEvery = 5 * time.Second
	// healthTimeout bounds one health check; healthTries failures in a row end
	// the connection.
	healthTimeout = 3 * time.Second
	healthTries   = 3
	// setupWait is how long a server that negotiates abilities may take to send
	// them.
	setupWait = 3 * time.Second
	// registeredWait is the pause after a server has registered the connection:
	// its naming service learns of it later.
	registeredWait = 100 * time.Millisecond
	// notReadyWait is the pause before a request to a server that was not ready
	// is retried.
	notReadyWait = 500 * time.Millisecond
)

// Names of negotiated abilities.
const (
	abilityFuzzyWatch = "fuzzyWatch"
)

// errReset ends a connection because the server asked for it.
type errReset struct {
	// to is the server that it recommends, "" for any.
	to string
}

// Error implements error.
func (e *errReset) Error() string {
	if e.to == "" {
		return "the server asked for another connection"
	}
	return "the server asked for a connection to " + e.to
}

// errHealth ends a connection whose server no longer answers.
var errHealth = fmt.Errorf("no answer to %d health checks", healthTries)

// conn is a gRPC connection to one server. Requests may be made concurrently;
// messages of the server go to the handler.
type conn struct {
	server server
	cc     *grpc.ClientConn
	client grpcapi.RequestClient
	stream grpcapi.BiRequestStream_RequestBiStreamClient
	sign   signer
	log    *slog.Logger
	heard  func() // called with each answer; may be nil

	// abilities are those the server announces; nil before 2.4.
	abilities map[string]bool

	sendMu sync.Mutex // one message at a time on the stream
}

// signer adds credentials to the headers of a request.
type signer interface {
	// headers returns new headers for a request about a resource, a result of
	// the function resource or "", and the version of the credentials.
	headers(resource string) (h map[string]string, used uint64, err error)
	// renew replaces refused credentials, and reports whether there are others.
	renew(ctx context.Context, s server, refused uint64) bool
}

// dial connects to a server: the connection, a check that it serves, the stream
// and its setup. The stream ends with ctx.
func dial(ctx context.Context, s server, t TLSConfig, sign signer, log *slog.Logger) (_ *conn, err error) {
	creds := insecure.NewCredentials()
	if t.GRPC {
		c, err := t.Config("tls")
		if err != nil {
			return nil, fmt.Errorf("connect to %s: %w", s.grpcAddress(), err)
		}
		creds = credentials.NewTLS(c)
	}
	cc, err := grpc.NewClient("passthrough:///"+s.grpcAddress(),
		grpc.WithTransportCredentials(creds),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
		grpc.WithDisableRetry(), grpc.WithDisableServiceConfig(), grpc.WithNoProxy(),
		// No keepalive pings: Nacos permits one in five minutes, and health
		// checks serve the same purpose.
	)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", s.grpcAddress(), err)
	}
	c := &conn{server: s, cc: cc, client: grpcapi.NewRequestClient(cc), sign: sign, log: log}
	defer func() {
		if err != nil {
			c.close()
		}
	}()
	err = c.setup(ctx)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", s.grpcAddress(), err)
	}
	return c, nil
}

// close closes the connection and its stream.
func (c *conn) close() { _ = c.cc.Close() }

// setup registers the connection with the server. The setup has a timeout; the
// stream has none.
func (c *conn) setup(ctx context.Context) error {
	bounded, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	var check serverCheckResponse
	for {
		err := c.call(bounded, checkTimeout, "", rpc_request.NewServerCheckRequest(), &check)
		if err == nil {
			break
		}
		if e, ok := errors.AsType[*serverError](err); !ok || e.code < codeNotReady || e.code > 399 {
			return err
		}
		if !plugin.Pause(bounded, notReadyWait, nil) {
			return fmt.Errorf("the server is not ready: %w", err)
		}
	}

	// The stream outlives the timeout, but not ctx. During setup the timeout
	// cancels it.
	streamCtx, cancelStream := context.WithCancel(ctx)
	stop := context.AfterFunc(bounded, cancelStream)
	stream, err := grpcapi.NewBiRequestStreamClient(c.cc).RequestBiStream(streamCtx)
	if err != nil {
		cancelStream()
		return fmt.Errorf("open the stream: %w", err)
	}
	c.stream = stream
	// Released when the stream ends, that is when the connection is closed.
	context.AfterFunc(stream.Context(), cancelStream)

	setup := setupRequest{ConnectionSetupRequest: rpc_request.NewConnectionSetupRequest(), AbilityTable: map[string]bool{abilityFuzzyWatch: true}}
	setup.ClientVersion = constant.CLIENT_VERSION
	setup.Labels = map[string]string{constant.LABEL_SOURCE: constant.LABEL_SOURCE_SDK, constant.LABEL_MODULE: constant.LABEL_MODULE_NAMING, "AppName": "isthmus"}
	p, err := encodeRequest(setup, nil)
	if err != nil {
		return err
	}
	if err := c.send(p); err != nil {
		return fmt.Errorf("set up: %w", err)
	}
	if check.SupportAbilityNegotiation {
		if err := c.awaitSetupAck(bounded, cancelStream); err != nil {
			return err
		}
	}
	if err := c.awaitRegistered(bounded); err != nil {
		return err
	}
	if !stop() {
		return context.Cause(bounded)
	}
	return nil
}

// awaitSetupAck receives the first message of the stream, which lists the
// server's abilities.
func (c *conn) awaitSetupAck(ctx context.Context, cancelStream context.CancelFunc) error {
	late := time.AfterFunc(setupWait, cancelStream)
	defer late.Stop()
	p, err := c.stream.Recv()
	if err != nil {
		return fmt.Errorf("wait for the server's abilities: %w", err)
	}
	if p.GetMetadata().GetType() != typeSetupAck {
		return fmt.Errorf("wait for the server's abilities: it sent %q", plugin.Excerpt(p.GetMetadata().GetType()))
	}
	r, err := decodeRequest(p)
	if err != nil {
		return err
	}
	c.abilities = r.AbilityTable
	if c.abilities == nil {
		c.abilities = map[string]bool{}
	}
	if err := c.send(encodeAck(typeSetupAck, r.RequestID)); err != nil {
		return fmt.Errorf("set up: %w", err)
	}
	return ctx.Err()
}

// awaitRegistered waits until the server has registered the connection, which
// it does asynchronously after the setup.
func (c *conn) awaitRegistered(ctx context.Context) error {
	for wait := 5 * time.Millisecond; ; wait = min(2*wait, 200*time.Millisecond) {
		err := c.health(ctx)
		if !hasCode(err, codeUnregistered) {
			plugin.Pause(ctx, registeredWait, nil)
			return err
		}
		if !plugin.Pause(ctx, wait, nil) {
			return fmt.Errorf("the server does not take the connection: %w", err)
		}
	}
}

// send sends a message on the stream.
func (c *conn) send(p *grpcapi.Payload) error {
	c.sendMu.Lock()
	defer c.sendMu.Unlock()
	err := c.stream.Send(p)
	if errors.Is(err, io.EOF) {
		return errors.New("the stream has ended")
	}
	return err
}

// call makes a request about a resource and decodes the answer into response, a
// pointer. If the credentials are refused, call renews them and retries once.
func (c *conn) call(ctx context.Context, timeout time.Duration, resource string, request rpc_request.IRequest, response any) error {
	used, err := c.callOnce(ctx, timeout, resource, request, response)
	if isForbidden(err) && c.sign.renew(ctx, c.server, used) {
		_, err = c.callOnce(ctx, timeout, resource, request, response)
	}
	return err
}

// callOnce is call without the retry. It returns the version of
// the credentials that it used.
func (c *conn) callOnce(ctx context.Context, timeout time.Duration, resource string, request rpc_request.IRequest, response any) (used uint64, err error) {
	headers, used, err := c.sign.headers(resource)
	if err != nil {
		return used, err
	}
	p, err := encodeRequest(request, headers)
	if err != nil {
		return used, err
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	answer, err := c.client.Request(ctx, p)
	switch {
	case err == nil:
		err = decodeResponse(answer, response)
		if err == nil && c.heard != nil {
			c.heard()
		}
	case ctx.Err() == nil:
		err = &errTransport{err}
	}
	if err != nil {
		err = fmt.Errorf("%s: %w", request.GetRequestType(), err)
	}
	return used, err
}

// health makes one health check.
func (c *conn) health(ctx context.Context) error {
	var response rpc_response.HealthCheckResponse
	return c.call(ctx, healthTimeout, "", rpc_request.NewHealthCheckRequest(), &response)
}

// keepHealthy makes health checks until ctx ends, too many fail, or the server
// no longer has the connection. A transport error ends it at once.
func (c *conn) keepHealthy(ctx context.Context) error {
	failures := 0
	for {
		wait := healthEvery
		if failures > 0 {
			wait = healthEvery / 10
		}
		if !plugin.Pause(ctx, wait, nil) {
			return context.Cause(ctx)
		}
		err := c.health(ctx)
		switch {
		case err == nil:
			failures = 0
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case hasCode(err, codeUnregistered):
			return err
		default:
			if failures++; failures == healthTries {
				return fmt.Errorf("%w: %w", errHealth, err)
			}
		}
	}
}

// receive passes messages of the server to handle and acknowledges them, until
// the stream ends. handle must not block.
func (c *conn) receive(handle func(typ string, r *serverRequest, err error)) error {
	for {
		p, err := c.stream.Recv()
		if err != nil {
			if errors.Is(err, io.EOF) {
				return errors.New("the server ended the stream")
			}
			return fmt.Errorf("stream: %w", err)
		}
		typ := p.GetMetadata().GetType()
		r, err := decodeRequest(p)
		handle(typ, r, err)
		if err := c.send(encodeAck(typ, r.RequestID)); err != nil {
			return fmt.Errorf("answer %s: %w", plugin.Excerpt(typ), err)
		}
		if typ == typeConnectReset {
			to := ""
			if r.ServerIP != "" && r.ServerPort != "" {
				to = net.JoinHostPort(r.ServerIP, r.ServerPort)
			}
			return &errReset{to: to}
		}
	}
}

// subscribe subscribes to a service and returns its current state.
func (c *conn) subscribe(ctx context.Context, namespace, group, name string) (model.Service, error) {
	var response rpc_response.SubscribeServiceResponse
	err := c.call(ctx, requestTimeout, resource(group, name), rpc_request.NewSubscribeServiceRequest(namespace, name, group, "", true), &response)
	return known(response.ServiceInfo, err)
}

// unsubscribe ends a subscription.
func (c *conn) unsubscribe(ctx context.Context, namespace, group, name string) error {
	var response rpc_response.SubscribeServiceResponse
	return c.call(ctx, requestTimeout, resource(group, name), rpc_request.NewSubscribeServiceRequest(namespace, name, group, "", false), &response)
}

// query returns the current state of a service.
func (c *conn) query(ctx context.Context, namespace, group, name string) (model.Service, error) {
	var response rpc_response.QueryServiceResponse
	err := c.call(ctx, requestTimeout, resource(group, name), rpc_request.NewServiceQueryRequest(namespace, name, group, "", false, 0), &response)
	return known(response.ServiceInfo, err)
}

// known returns an answer about a service, or an error if it has no list of
// instances.
func known(info model.Service, err error) (model.Service, error) {
	if err == nil && info.Hosts == nil {
		err = errNoHosts
	}
	return info, err
}

// listPage requests one page of a group's services, counted from 1.
func (c *conn) listPage(ctx context.Context, namespace, group string, page, size int) (names []string, total int, err error) {
	// An answer without a count is not a list.
	var response struct {
		Count        *int     `json:"count"`
		ServiceNames []string `json:"serviceNames"`
	}
	err = c.call(ctx, requestTimeout, resource(group, ""), rpc_request.NewServiceListRequest(namespace, "", group, page, size, ""), &response)
	if err == nil && response.Count == nil {
		err = errNoList
	}
	if err != nil {
		return nil, 0, err
	}
	return response.ServiceNames, *response.Count, nil
}

// fuzzyWatch asks the server to announce the services that match a pattern,
// except those in received.
func (c *conn) fuzzyWatch(ctx context.Context, namespace, pattern string, received []string, initial bool) error {
	if received == nil {
		received = []string{}
	}
	var response rpc_response.Response
	return c.call(ctx, requestTimeout, "", &fuzzyWatchRequest{
		Request: &rpc_request.Request{}, Namespace: namespace, GroupKeyPattern: pattern, ReceivedGroupKeys: received,
		WatchType: fuzzyWatch, Initializing: initial, IsInitializing: initial, Module: constant.LABEL_MODULE_NAMING,
	}, &response)
}

// resource returns the name of a service in signatures; without a name, that of
// a group's list.
func resource(group, name string) string {
	if group == "" || strings.Contains(name, serviceKeySeparator) {
		return name
	}
	return group + serviceKeySeparator + name
}

// abilityNames lists the server's abilities, for the log.
func (c *conn) abilityNames() []string {
	var names []string
	for name, on := range c.abilities {
		if on {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// errTransport is a request that failed in transport, before its deadline.
type errTransport struct{ err error }

// Error implements error.
func (e *errTransport) Error() string { return e.err.Error() }

// Unwrap returns the error of gRPC.
func (e *errTransport) Unwrap() error { return e.err }

// isTransport reports whether err means that the connection failed or cannot be
// made.
func isTransport(err error) bool {
	_, ok := errors.AsType[*errTransport](err)
	return ok
}
