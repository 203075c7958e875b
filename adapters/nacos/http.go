package nacos

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/nacos-group/nacos-sdk-go/v2/model"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// httpTimeout bounds one request of the HTTP API.
const httpTimeout = 15 * time.Second

// newHTTPClient returns the client of the HTTP API. It sends no credentials of
// its own.
func newHTTPClient(t plugin.TLS) (*plugin.HTTPClient, error) {
	return plugin.HTTP{TLS: t, Timeout: plugin.Duration(httpTimeout)}.NewClient(maxMessage)
}

// httpDo makes a request, with form as its body unless empty, and returns the
// body and status of the answer.
func httpDo(ctx context.Context, client *plugin.HTTPClient, method, target, form string, headers map[string]string) (body []byte, status int, err error) {
	req, err := http.NewRequestWithContext(ctx, method, target, strings.NewReader(form))
	if err != nil {
		return nil, 0, err
	}
	if form != "" {
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	for k, v := range headers {
		req.Header.Set(k, v)
	}
	err = client.Do(req, func(res *http.Response) (err error) {
		status = res.StatusCode
		body, err = io.ReadAll(res.Body)
		return err
	})
	if e, ok := errors.AsType[*plugin.StatusError](err); ok {
		return e.Body, e.Status, nil
	}
	if err != nil && status == 0 {
		err = &errTransport{err}
	}
	if err != nil {
		return nil, 0, fmt.Errorf("%s: %w", req.URL.Path, err)
	}
	return body, status, nil
}

// httpAPI is the HTTP API of one server.
type httpAPI struct {
	server server
	client *plugin.HTTPClient
	auth   *auth
	heard  func() // called with each answer; may be nil
}

// errStatus is an answer of the HTTP API with an error status.
type errStatus struct {
	path   string
	status int
	text   string
}

// Error implements error.
func (e *errStatus) Error() string {
	return fmt.Sprintf("%s: nacos answers status %d %q", e.path, e.status, plugin.Excerpt(e.text))
}

// saying returns the message of an error answer. Of JSON it returns the message
// and data, or the error: other fields, such as a time, differ in each answer
// and would make each failure a new one.
func saying(body []byte) string {
	var answer struct {
		Message string `json:"message"`
		Error   string `json:"error"`
		Data    any    `json:"data"`
	}
	_ = json.Unmarshal(body, &answer) // decoded fields are set even on error
	text := cmp.Or(answer.Message, answer.Error)
	if text == "" {
		return string(body)
	}
	if d, ok := answer.Data.(string); ok && d != "" {
		text += ": " + d
	}
	return text
}

// isAbsent reports whether err means that the server lacks the API.
func isAbsent(err error) bool {
	e, ok := errors.AsType[*errStatus](err)
	return ok && (e.status == http.StatusNotFound || e.status == http.StatusGone || e.status == http.StatusNotImplemented || e.status == http.StatusMethodNotAllowed)
}

// isRefused reports whether err means that access is denied.
func isRefused(err error) bool {
	e, ok := errors.AsType[*errStatus](err)
	return ok && (e.status == http.StatusForbidden || e.status == http.StatusUnauthorized) || isForbidden(err)
}

// get makes a request and decodes the answer, a JSON object, into answer. If
// the credentials are refused, get renews them and retries once.
func (h *httpAPI) get(ctx context.Context, path, resource string, query url.Values, answer any) error {
	used, err := h.getOnce(ctx, path, resource, query, answer)
	if isRefused(err) && h.auth.renew(ctx, h.server, used) {
		_, err = h.getOnce(ctx, path, resource, query, answer)
	}
	return err
}

func (h *httpAPI) getOnce(ctx context.Context, path, resource string, query url.Values, answer any) (used uint64, err error) {
	access, used, err := h.auth.headers(resource)
	if err != nil {
		return used, err
	}
	headers := map[string]string{}
	if token := access[headerToken]; token != "" {
		headers["Authorization"] = "Bearer " + token
		headers[headerToken] = token
	}
	q := url.Values{}
	for k, v := range query {
		q[k] = v
	}
	for k, v := range access {
		if k != headerToken {
			q.Set(k, v)
		}
	}
	body, status, err := httpDo(ctx, h.client, http.MethodGet, h.server.url(path)+"?"+q.Encode(), "", headers)
	if err != nil {
		return used, err
	}
	if status != http.StatusOK {
		return used, &errStatus{path: path, status: status, text: saying(body)}
	}
	// From 2.2 on answers have an envelope with an error code.
	var envelope struct {
		Code    *int   `json:"code"`
		Message string `json:"message"`
	}
	if err := json.Unmarshal(body, &envelope); err != nil {
		return used, fmt.Errorf("%s: the answer is not JSON: %w", path, err)
	}
	if envelope.Code != nil && *envelope.Code != 0 && *envelope.Code != http.StatusOK {
		return used, &errStatus{path: path, status: *envelope.Code, text: envelope.Message}
	}
	if err := json.Unmarshal(body, answer); err != nil {
		return used, fmt.Errorf("%s: %w", path, err)
	}
	if h.heard != nil {
		h.heard()
	}
	return used, nil
}

// answers returns nil if the server's HTTP API answers, with any status.
func (h *httpAPI) answers(ctx context.Context) error {
	_, status, err := httpDo(ctx, h.client, http.MethodGet, h.server.url("/v1/ns/operator/metrics"), "", nil)
	if err == nil && status >= http.StatusInternalServerError {
		err = &errStatus{path: "/v1/ns/operator/metrics", status: status}
	}
	return err
}

// namespacePaths are the endpoints that list namespaces: 3.x, 2.x, 1.x.
var namespacePaths = []string{"/v3/admin/core/namespace/list", "/v2/console/namespace/list", "/v1/console/namespaces"}

// namespaces lists the ids of the namespaces, including the public one by name.
func (h *httpAPI) namespaces(ctx context.Context) ([]string, error) {
	var err error
	for _, path := range namespacePaths {
		var answer struct {
			Data *[]struct {
				Namespace string `json:"namespace"`
			} `json:"data"`
		}
		if err = h.get(ctx, path, "", nil, &answer); isAbsent(err) {
			continue
		}
		if err == nil && answer.Data == nil {
			err = fmt.Errorf("%s: %w", path, errNoList)
		}
		if err != nil {
			return nil, err
		}
		ids := []string{publicNamespace}
		for _, d := range *answer.Data {
			if n := canonicalNamespace(d.Namespace); n != publicNamespace {
				ids = append(ids, n)
			}
		}
		return ids, nil
	}
	return nil, err
}

// groupedName is a service in lists of all groups.
type groupedName struct {
	Name      string `json:"name"`
	GroupName string `json:"groupName"`
}

// listAllPage requests one page of a namespace's services of all groups,
// counted from 1.
func (h *httpAPI) listAllPage(ctx context.Context, namespace string, page, size int) (names []groupedName, total int, err error) {
	q := url.Values{
		"namespaceId": {namespace}, "pageNo": {strconv.Itoa(page)}, "pageSize": {strconv.Itoa(size)}, "withInstances": {"false"},
		"hasIpCount": {"false"}, "groupNameParam": {""}, "serviceNameParam": {""}, "ignoreEmptyService": {"false"},
	}
	var v3 struct {
		Data struct {
			TotalCount *int          `json:"totalCount"`
			PageItems  []groupedName `json:"pageItems"`
		} `json:"data"`
	}
	const pathV3, pathV1 = "/v3/admin/ns/service/list", "/v1/ns/catalog/services"
	err = h.get(ctx, pathV3, "", q, &v3)
	switch {
	case err == nil && v3.Data.TotalCount == nil:
		return nil, 0, fmt.Errorf("%s: %w", pathV3, errNoList)
	case err == nil:
		return v3.Data.PageItems, *v3.Data.TotalCount, nil
	case !isAbsent(err):
		return nil, 0, err
	}
	var v1 struct {
		Count *int          `json:"count"`
		List  []groupedName `json:"serviceList"`
	}
	err = h.get(ctx, pathV1, "", q, &v1)
	if err == nil && v1.Count == nil {
		err = fmt.Errorf("%s: %w", pathV1, errNoList)
	}
	if err != nil {
		return nil, 0, err
	}
	return v1.List, *v1.Count, nil
}

// emptyGroups returns the groups that have services in the empty namespace.
// Only servers before 3.0 list them, among those of all namespaces: no request
// can name that namespace.
func (h *httpAPI) emptyGroups(ctx context.Context) ([]string, error) {
	var answer struct {
		Services map[string][]string `json:"services"` // by namespace, as "GROUP@@NAME"
	}
	const path = "/v1/ns/service/names"
	err := h.get(ctx, path, "", nil, &answer)
	if err == nil && answer.Services == nil {
		err = fmt.Errorf("%s: %w", path, errNoList)
	}
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	var groups []string
	for _, n := range answer.Services[""] {
		if g, _ := splitGrouped("", n); g != "" && !seen[g] {
			seen[g] = true
			groups = append(groups, g)
		}
	}
	return groups, nil
}

// errNoList reports an answer in JSON that is not a list.
var errNoList = errors.New("the answer is not a list")

// listGroupPage requests one page of a group's services, counted from 1.
func (h *httpAPI) listGroupPage(ctx context.Context, namespace, group string, page, size int) (names []string, total int, err error) {
	q := url.Values{"namespaceId": {namespace}, "groupName": {group}, "pageNo": {strconv.Itoa(page)}, "pageSize": {strconv.Itoa(size)}}
	var answer struct {
		Count *int     `json:"count"`
		Doms  []string `json:"doms"`
	}
	const path = "/v1/ns/service/list"
	err = h.get(ctx, path, "", q, &answer)
	if err == nil && answer.Count == nil {
		err = fmt.Errorf("%s: %w", path, errNoList)
	}
	if err != nil {
		return nil, 0, err
	}
	return answer.Doms, *answer.Count, nil
}

// query returns the current state of a service.
func (h *httpAPI) query(ctx context.Context, namespace, group, name string) (model.Service, error) {
	grouped := group + serviceKeySeparator + name
	q := url.Values{"namespaceId": {namespace}, "serviceName": {grouped}, "groupName": {group}, "healthyOnly": {"false"}}
	var answer struct {
		model.Service
		// Hosts is required: an answer without it is not a service.
		Hosts *[]model.Instance `json:"hosts"`
		// Valid shadows the SDK's field, which is a string in some versions.
		Valid       any `json:"valid"`
		LastRefTime any `json:"lastRefTime"`
		CacheMillis any `json:"cacheMillis"`
	}
	const path = "/v1/ns/instance/list"
	err := h.get(ctx, path, grouped, q, &answer)
	if err == nil && answer.Hosts == nil {
		err = fmt.Errorf("%s: %w", path, errNoHosts)
	}
	if err != nil {
		return model.Service{}, err
	}
	s := answer.Service
	s.Hosts = *answer.Hosts
	return s, nil
}
