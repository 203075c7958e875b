package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// client holds the flags of commands that call a bridge.
type client struct {
	tls   bool
	files plugin.TLS
	token string // file
	of    string // prefix of the flags, "" or such as "old-"
}

// flagsOf adds the flags of one of several bridges.
func (c *client) flagsOf(of string, f *pflag.FlagSet) {
	own := pflag.NewFlagSet("", pflag.ContinueOnError)
	c.flags(own)
	c.of = of + "-"
	own.VisitAll(func(flag *pflag.Flag) {
		flag.Name, flag.Usage = c.of+flag.Name, "--"+of+": "+flag.Usage
		f.AddFlag(flag)
	})
}

func (c *client) flags(f *pflag.FlagSet) {
	f.BoolVar(&c.tls, "tls", false, "dial with TLS; a certificate, a name or an authority to check implies it")
	f.StringVar(&c.files.CAFile, "ca-file", "", "PEM `FILE` of the authorities of the listener's certificate (default: the system's)")
	f.StringVar(&c.files.CertFile, "cert-file", "", "PEM `FILE` of a client certificate")
	f.StringVar(&c.files.KeyFile, "key-file", "", "PEM `FILE` of its key")
	f.StringVar(&c.files.ServerName, "server-name", "", "`NAME` in the listener's certificate (default: the host of the address)")
	f.StringVar(&c.token, "token-file", "", "`FILE` of a bearer token to send")
}

// check returns the error of flags that contradict each other.
func (c *client) check() error {
	if (c.files.CertFile == "") != (c.files.KeyFile == "") {
		return fmt.Errorf("--%[1]scert-file and --%[1]skey-file go together", c.of)
	}
	return nil
}

func (c *client) encrypted() bool { return c.tls || c.files != plugin.TLS{} }

// dial returns the options of a gRPC connection. Files are read now.
func (c *client) dial() (options []grpc.DialOption, err error) {
	if c.encrypted() {
		config, err := c.files.Config("")
		if err != nil {
			return nil, c.flagError(err)
		}
		options = append(options, grpc.WithTransportCredentials(credentials.NewTLS(config)))
	}
	if c.token != "" {
		if _, err := plugin.ReadSecret(c.token); err != nil {
			return nil, fmt.Errorf("--%stoken-file: %w", c.of, err)
		}
		options = append(options, grpc.WithPerRPCCredentials(bearer(c.token)))
	}
	return options, nil
}

// flagError names the flag instead of the field.
func (c *client) flagError(err error) error {
	if f, ok := errors.AsType[*plugin.FieldError](err); ok {
		return fmt.Errorf("--%s%s: %s", c.of, strings.ReplaceAll(strings.TrimPrefix(f.Field, "."), "_", "-"), f.Reason)
	}
	return err
}

// bearer sends the token of a file, which is read for each stream.
type bearer string

// GetRequestMetadata implements credentials.PerRPCCredentials.
func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	token, err := plugin.ReadSecret(string(b))
	return map[string]string{"authorization": "Bearer " + token}, err
}

// RequireTransportSecurity implements credentials.PerRPCCredentials. On
// loopback plaintext is as good.
func (bearer) RequireTransportSecurity() bool { return false }

// do sends a request to the admin address of a bridge: host:port, a URL, or
// unix:PATH.
func (c *client) do(req *http.Request, address string) (*http.Response, error) {
	if c.token != "" {
		token, err := plugin.ReadSecret(c.token)
		if err != nil {
			return nil, fmt.Errorf("--%stoken-file: %w", c.of, err)
		}
		req.Header.Set("Authorization", "Bearer "+token)
	}
	t := http.DefaultTransport.(*http.Transport).Clone() //nolint:forcetypeassert // documented
	t.DisableKeepAlives = true
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		t.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		}
	}
	if c.encrypted() || strings.HasPrefix(address, "https://") {
		config, err := c.files.Config("")
		if err != nil {
			return nil, c.flagError(err)
		}
		t.TLSClientConfig = config
	}
	return (&http.Client{Transport: t}).Do(req)
}

// callTime bounds one call of the admin API: a decision on a million endpoints
// takes seconds.
const callTime = time.Minute

// maxAnswer bounds the answer to a call, in bytes.
const maxAnswer = 16 << 20

// call POSTs a question to a path of a bridge's API and decodes the answer.
// What the bridge declines is an error in its words.
func (c *client) call(ctx context.Context, address, path string, question, answer any) error {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	body, err := json.Marshal(question)
	if err != nil {
		return err
	}
	const cure = "is this the address after admin= in the line \"serving\" of the bridge's log?"
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url(address, path), bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("%w; %s", err, cure)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.do(req, address)
	if _, unreached := errors.AsType[*url.Error](err); unreached {
		return fmt.Errorf("%w; %s", err, cure)
	}
	if err != nil {
		return err // a flag's
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return fmt.Errorf("%s: %w", req.URL, err)
	}
	if resp.StatusCode == http.StatusOK || resp.StatusCode == http.StatusUnprocessableEntity {
		if err = json.Unmarshal(text, answer); err == nil {
			return nil
		}
	}
	var declined struct{ Error string }
	if json.Unmarshal(text, &declined) == nil && declined.Error != "" {
		return errors.New(declined.Error)
	}
	return fmt.Errorf("%s answered %s: %.200q; %s", req.URL, resp.Status, text, cure)
}

// url returns the URL of a path of the admin address.
func (c *client) url(address, path string) string {
	scheme := "http"
	if c.encrypted() {
		scheme = "https"
	}
	switch {
	case strings.HasPrefix(address, "unix:"):
		return scheme + "://localhost" + path
	case strings.Contains(address, "://"):
		return strings.TrimSuffix(address, "/") + path
	default:
		return scheme + "://" + address + path
	}
}

// checkAddress returns an error unless the address is host:port or unix:PATH.
func checkAddress(address, example string) error {
	if strings.HasPrefix(address, "unix:") {
		return nil
	}
	if _, _, err := net.SplitHostPort(address); err != nil {
		return fmt.Errorf("--address %s: must be host:port, for example %s, or unix:PATH", address, example)
	}
	return nil
}
