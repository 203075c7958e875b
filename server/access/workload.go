package access

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	"github.com/spiffe/go-spiffe/v2/workloadapi"

	"github.com/isthmus-mesh/isthmus/internal/conf"
	"github.com/isthmus-mesh/isthmus/server/config"
)

// workloadWait bounds the wait for the first certificate of a Workload API.
const workloadWait = 10 * time.Second

// workload is the TLS of a listener whose certificate and authorities come from
// a SPIFFE Workload API. It implements [workloadapi.X509ContextWatcher].
type workload struct {
	block config.ListenerTLS
	end   context.CancelFunc
	ended chan struct{} // closed when the API is no longer followed
	begun chan struct{} // closed with the first certificate

	mu           sync.Mutex
	tls          *tls.Config // guarded by mu, as the rest; nil before begun is closed
	begins, ends time.Time   // of the certificate
	count        int         // of updates
	cause        error       // why there is nothing newer
}

func newWorkload(c config.ListenerTLS) (*workload, error) {
	ctx, end := context.WithCancel(context.Background()) // until close
	w := &workload{block: c, end: end, ended: make(chan struct{}), begun: make(chan struct{})}
	// Ends with close, which waits for it.
	go func() {
		defer close(w.ended)
		w.OnX509ContextWatchError(workloadapi.WatchX509Context(ctx, w, workloadapi.WithAddr(c.WorkloadAPI)))
	}()
	timer := time.NewTimer(workloadWait)
	defer timer.Stop()
	select {
	case <-w.begun:
		return w, nil
	case <-w.ended:
	case <-timer.C:
	}
	w.close()
	return nil, &conf.FieldError{Field: "tls.workload_api", Reason: fmt.Sprintf("no certificate within %v: %v", workloadWait, w.fault())}
}

func (w *workload) close() {
	w.end()
	<-w.ended
}

func (w *workload) get() *tls.Config {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.tls
}

func (w *workload) valid() (from, until time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.begins, w.ends
}

func (w *workload) generation() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.count
}

func (w *workload) fault() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cause == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", w.block.WorkloadAPI, w.cause)
}

// OnX509ContextUpdate implements [workloadapi.X509ContextWatcher].
func (w *workload) OnX509ContextUpdate(x *workloadapi.X509Context) {
	svid := x.DefaultSVID()
	pair := tls.Certificate{PrivateKey: svid.PrivateKey, Leaf: svid.Certificates[0]}
	for _, c := range svid.Certificates {
		pair.Certificate = append(pair.Certificate, c.Raw)
	}
	out := tlsConfig(w.block, pair)
	if w.block.Verifies() {
		out.ClientCAs = x509.NewCertPool()
		for _, bundle := range x.Bundles.Bundles() {
			for _, authority := range bundle.X509Authorities() {
				out.ClientCAs.AddCert(authority)
			}
		}
		// The authorities of one trust domain may not speak for another.
		out.VerifyPeerCertificate = func(raw [][]byte, _ [][]*x509.Certificate) error {
			if len(raw) == 0 {
				return nil // permitted by client_auth
			}
			_, _, err := x509svid.ParseAndVerify(raw, x.Bundles)
			return err
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.tls == nil {
		close(w.begun)
	}
	w.tls, w.begins, w.ends, w.cause = out, pair.Leaf.NotBefore, pair.Leaf.NotAfter, nil
	w.count++
}

// OnX509ContextWatchError implements [workloadapi.X509ContextWatcher].
func (w *workload) OnX509ContextWatchError(err error) {
	if err == nil || errors.Is(err, context.Canceled) {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cause == nil || w.tls != nil {
		w.cause = err
	}
}
