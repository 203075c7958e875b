package kubernetes

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	kjson "k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"

	"github.com/isthmus-mesh/isthmus/plugin"
)

const (
	// maxPage bounds one answer but a watch, in bytes.
	maxPage = 64 << 20
	// pageObjects is the number of objects of one page of a listing.
	pageObjects = 500
)

// client speaks to one server. It is safe for concurrent use.
type client struct {
	rest    rest.Interface
	http    *http.Client
	timeout time.Duration
	ends    time.Duration // in tests, when each watch ends, in place of what is asked for
}

// newClient returns a client. The connection is made with the first request.
func newClient(k *cluster, timeout time.Duration) (*client, error) {
	dialer := &net.Dialer{Timeout: timeout, KeepAlive: 30 * time.Second}
	transport := &http.Transport{
		DialContext: dialer.DialContext,
		DialTLSContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			c, err := k.tlsConfig()
			if err != nil {
				return nil, err
			}
			return (&tls.Dialer{NetDialer: dialer, Config: c}).DialContext(ctx, network, address)
		},
		Proxy:                 k.config.Proxy, // none of the environment
		ForceAttemptHTTP2:     true,
		ResponseHeaderTimeout: timeout,
		// All watches are streams of one connection; a server that is silent on
		// it is asked whether it is there.
		HTTP2: &http.HTTP2Config{SendPingTimeout: timeout / 2, PingTimeout: timeout / 2},
	}
	if k.config.Proxy != nil {
		c, err := k.tlsConfig()
		if err != nil {
			return nil, err
		}
		transport.DialTLSContext, transport.TLSClientConfig = nil, c
	}
	config := rest.CopyConfig(k.config)
	config.TLSClientConfig = rest.TLSClientConfig{} // which is the transport's
	config.UserAgent = "isthmus"
	config.QPS = -1 // a source sends one request at a time
	config.WarningHandler = rest.NoWarnings{}
	config.NegotiatedSerializer = codec
	wrapped, err := rest.HTTPWrappersForConfig(config, &bounded{transport})
	if err != nil {
		return nil, err
	}
	c := &client{timeout: timeout, http: &http.Client{
		Transport: wrapped,
		// A redirect would get the token.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
	c.rest, err = rest.UnversionedRESTClientForConfigAndClient(config, c.http)
	return c, err
}

// close closes the connections, which must be idle.
func (c *client) close() { c.http.CloseIdleConnections() }

// bounded bounds the size of answers and notes why there was none.
type bounded struct{ *http.Transport }

// failure is the key of a context for the address of an error: why the server
// could not be asked. Package rest takes some of them for the end of a watch.
type failure struct{}

// RoundTrip implements http.RoundTripper.
func (b *bounded) RoundTrip(req *http.Request) (*http.Response, error) {
	res, err := b.Transport.RoundTrip(req)
	if to, ok := req.Context().Value(failure{}).(*error); ok {
		*to = err
	}
	if err == nil && !req.URL.Query().Has("watch") {
		res.Body = http.MaxBytesReader(nil, res.Body, maxPage)
	}
	return res, err
}

// source is one resource that is listed and watched.
type source struct {
	path   string // of the API, with the namespace
	labels string
	fields string
	kind   string
}

// get returns a request for a path.
func (c *client) get(path string, options *metav1.ListOptions) *rest.Request {
	r := c.rest.Get().AbsPath(path).MaxRetries(0)
	if options != nil {
		r.VersionedParams(options, metav1.ParameterCodec)
	}
	return r
}

// read reads one object.
func (c *client) read(ctx context.Context, path string, options *metav1.ListOptions, into runtime.Object) error {
	ctx, cancel := context.WithTimeoutCause(ctx, c.timeout, fmt.Errorf("no whole answer within %v; if it is a large one, raise timeout", c.timeout))
	defer cancel()
	err := c.get(path, options).Do(ctx).Into(into)
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// list returns a page of a listing.
func (c *client) list(ctx context.Context, s source, options metav1.ListOptions) (*page, error) {
	options.LabelSelector, options.FieldSelector = s.labels, s.fields
	if options.ResourceVersion == "0" {
		options.ResourceVersion = "" // what a cache has may be old, and comes without pages
	}
	p := &page{}
	switch err := c.read(ctx, s.path, &options, p); {
	case err != nil:
		return nil, err
	case !strings.HasSuffix(p.Kind, "List") || p.ResourceVersion == "":
		return nil, fmt.Errorf("the answer to %s is not a list with a revision, but of kind %q", s.path, plugin.Excerpt(p.Kind))
	case p.Continue != "" && p.Continue == options.Continue:
		return nil, fmt.Errorf("the server lists %s in a circle", s.path)
	}
	return p, nil
}

// watch opens a watch.
func (c *client) watch(ctx context.Context, s source, options metav1.ListOptions) (watch.Interface, error) {
	options.LabelSelector, options.FieldSelector, options.Watch = s.labels, s.fields, true
	if c.ends > 0 {
		options.TimeoutSeconds = new(int64(c.ends.Seconds()))
	}
	// A server that forgets to end it is not waited for.
	ctx, cancel := context.WithTimeout(ctx, time.Duration(*options.TimeoutSeconds)*time.Second+c.timeout)
	var failed error
	w, err := c.get(s.path, &options).Watch(context.WithValue(ctx, failure{}, &failed))
	if err == nil && failed != nil {
		w.Stop()
		err = failed
	}
	if err != nil {
		cancel()
		return nil, err
	}
	return &watching{w, cancel}, nil
}

// watching is an open watch.
type watching struct {
	watch.Interface
	cancel context.CancelFunc
}

// Stop implements watch.Interface.
func (w *watching) Stop() {
	w.cancel()
	w.Interface.Stop()
}

// explain returns an error of a request in the adapter's words.
func explain(err error) error {
	if s, ok := errors.AsType[*apierrors.StatusError](err); ok {
		text := fmt.Sprintf("answers status %d: %s", s.ErrStatus.Code, plugin.Excerpt(s.ErrStatus.Message))
		switch s.ErrStatus.Code {
		case http.StatusUnauthorized:
			text += ": it does not know the user; check the token or the certificate, which may be over"
		case http.StatusForbidden:
			text += ": grant the user list and watch; the adapter's page has the manifest"
		}
		return errors.New(text)
	}
	if u, ok := errors.AsType[*url.Error](err); ok {
		err = u.Err // the address is in the registry's detail
	}
	if o, ok := errors.AsType[*net.OpError](err); ok && o.Source != nil {
		return fmt.Errorf("%s: %w", o.Op, o.Err) // without a port that is another one each time
	}
	return err
}

// expired reports whether a revision, or a place in a listing, is one that the
// server no longer has, or does not have yet.
func expired(err error) bool {
	return apierrors.IsResourceExpired(err) || apierrors.IsGone(err) || apierrors.HasStatusCause(err, metav1.CauseTypeResourceVersionTooLarge)
}

// object is an object of any kind, from its arrival until it is applied. Its
// metadata are its name, its revision, and what the library looks at.
type object struct {
	metav1.TypeMeta
	metav1.ObjectMeta

	raw   json.RawMessage // until it is read
	value any             // what the follower has read
	err   error           // why it could not
}

// UnmarshalJSON implements json.Unmarshaler. What can be read of it is kept in
// any case.
func (o *object) UnmarshalJSON(b []byte) error {
	var head struct {
		metav1.TypeMeta
		Metadata struct {
			Namespace   string
			Name        string
			Revision    string `json:"resourceVersion"`
			Annotations struct {
				End string `json:"k8s.io/initial-events-end"` // metav1.InitialEventsAnnotationKey
			}
		}
	}
	o.err = json.Unmarshal(b, &head)
	m := head.Metadata
	o.TypeMeta = head.TypeMeta
	o.Namespace, o.Name, o.ResourceVersion = m.Namespace, m.Name, m.Revision
	if m.Annotations.End != "" {
		o.Annotations = map[string]string{metav1.InitialEventsAnnotationKey: m.Annotations.End}
	}
	o.raw = bytes.Clone(b)
	return nil
}

// DeepCopyObject implements runtime.Object. Nothing changes an object.
func (o *object) DeepCopyObject() runtime.Object { return new(*o) }

// page is a page of a listing.
type page struct {
	metav1.TypeMeta
	metav1.ListMeta `json:"metadata"`

	Items []object `json:"items"`
}

// DeepCopyObject implements runtime.Object.
func (p *page) DeepCopyObject() runtime.Object { return new(*p) }

// codec reads objects of every kind alike.
var codec = runtime.NewSimpleNegotiatedSerializer(runtime.SerializerInfo{
	MediaType: runtime.ContentTypeJSON, MediaTypeType: "application", MediaTypeSubType: "json", EncodesAsText: true,
	Serializer:       runtime.NoopEncoder{Decoder: decoder{}},
	StreamSerializer: &runtime.StreamSerializerInfo{EncodesAsText: true, Serializer: runtime.NoopEncoder{Decoder: decoder{}}, Framer: kjson.Framer},
})

type decoder struct{}

// Decode implements runtime.Decoder.
func (decoder) Decode(data []byte, _ *schema.GroupVersionKind, into runtime.Object) (runtime.Object, *schema.GroupVersionKind, error) {
	o := new(object)
	if into == nil {
		into = o
	}
	err := json.Unmarshal(data, into)
	if err == nil && o.Kind == "Status" {
		into = new(metav1.Status)
		err = json.Unmarshal(data, into)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("no JSON of the expected form: %w", err)
	}
	return into, new(into.GetObjectKind().GroupVersionKind()), nil
}

// goesBack reports whether a revision is before another one. They are numbers
// for every server that is conformant from 1.35 on, and were before; of others
// nothing is said.
func goesBack(was, is string) bool {
	n, err := resourceversion.CompareResourceVersion(is, was)
	return err == nil && n < 0
}
